"""Off-policy sequence masking: who goes, and that the denominator stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asynctensorrlhf.losses.opsm import OPSM, off_policy_sequence_mask
from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio
from asynctensorrlhf.losses.surrogate import log_ratio
from tests.losses.composed import composed, full_inputs, run


def test_the_mask_equals_the_golden_vector(golden):
    vector = golden("opsm_and_dppo_masks")
    delta = log_ratio(vector.inputs["logp_new"], vector.inputs["logp_old"], vector.mask)
    vector.check(-geometric_log_ratio(delta, vector.mask), "seq_kl")
    advantages = vector.inputs["opsm_advantages"][:, None].expand_as(delta)
    keep = off_policy_sequence_mask(delta, advantages, vector.mask, vector.config["opsm_delta"])
    vector.check(keep.any(dim=1), "opsm_keep")
    assert torch.equal(keep, vector.mask & keep.any(dim=1, keepdim=True))


def test_a_dropped_sequence_has_no_gradient_and_stays_in_the_denominator():
    policy = torch.tensor([[-0.9, -0.3], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    advantages = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    output = composed(OPSM, sequence_kl_threshold=0.5)(whole_batch(policy, torch.zeros_like(policy), advantages, mask))
    output.loss.backward()
    assert output.loss.item() == 0.5
    assert policy.grad.tolist() == [[0.0, 0.0], [0.25, 0.25]]
    assert output.metrics["loss/masked_fraction"] == 0.5


def test_only_bad_tokens_that_the_policy_left_behind_go():
    delta = torch.tensor([[-0.9, -0.3], [-0.9, -0.3], [0.9, 0.3]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    advantages = torch.tensor([[-1.0, 1.0], [1.0, 0.0], [-1.0, -1.0]])
    keep = off_policy_sequence_mask(delta, advantages, mask, 0.5)
    assert keep.tolist() == [[False, True], [True, True], [True, True]]


def test_the_distance_is_to_the_sampler_whatever_the_proximal_policy():
    inputs = full_inputs(spread=1.0)
    inputs = replace(inputs, proximal_logprobs=inputs.policy_logprobs)
    masked = [
        run(composed(OPSM, proximal=proximal), inputs)[0].metrics["loss/masked_fraction"]
        for proximal in ("rollout", "recompute")
    ]
    assert masked[0] == masked[1] > 0


def test_a_negative_threshold_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^loss.sequence_kl_threshold must be >= 0, got -0.1"):
        composed(OPSM, sequence_kl_threshold=-0.1)
