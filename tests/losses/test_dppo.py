"""DPPO: a trust region in probabilities."""

from __future__ import annotations

import pytest
import torch

from asynctensorrlhf.losses.dppo import DPPO, total_variation_mask
from asynctensorrlhf.losses.policy_loss import whole_batch
from tests.losses.composed import composed


def test_mask_loss_and_gradient_equal_the_golden_vector(golden):
    vector = golden("opsm_and_dppo_masks")
    policy, *rest = vector.plain()
    radii = {"tv_threshold_low": vector.config["dppo_delta"], "tv_threshold_high": vector.config["dppo_delta"]}
    keep = total_variation_mask(policy, *rest, **radii)
    vector.check(keep, "dppo_valid")
    output = composed(DPPO, **radii)(whole_batch(policy, *rest))
    output.loss.backward()
    vector.check(output.loss, "dppo_loss")
    vector.check(policy.grad, "dppo_grad_logp_new")
    masked = (vector.mask & ~keep).sum() / vector.mask.sum()
    torch.testing.assert_close(output.metrics["loss/masked_fraction"], masked.to(vector.dtype))


@pytest.mark.parametrize(
    ("proximal", "policy", "advantage", "stays"),
    [
        (0.001, 0.01, 1.0, True),  # ten times likelier, yet a small move
        (0.5, 0.8, 1.0, False),
        (0.8, 0.5, 1.0, True),  # a good token that fell is pulled back up
        (0.8, 0.5, -1.0, False),
        (0.5, 0.8, -1.0, True),
        (0.5, 0.65, 1.0, True),
        (0.5, 0.25, -1.0, False),
        (0.5, 0.35, -1.0, True),
    ],
)
def test_a_token_goes_only_when_its_probability_moved_too_far_the_way_it_is_pushed(proximal, policy, advantage, stays):
    new, old, advantages = (torch.tensor([[value]], dtype=torch.float64) for value in (policy, proximal, advantage))
    mask = torch.ones(1, 1, dtype=torch.bool)
    keep = total_variation_mask(new.log(), old.log(), advantages, mask, tv_threshold_low=0.2, tv_threshold_high=0.2)
    assert keep.item() == stays


def test_the_weight_is_capped_and_a_constant():
    policy = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.full_like(policy, -1.0 - 4.0)  # ratio 54.6, far likelier, yet a bad token may
    output = composed(DPPO)(
        whole_batch(policy, behaviour, -torch.ones(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    )
    output.loss.backward()
    assert (output.loss.item(), policy.grad.item()) == (-20.0, 20.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tv_threshold_low": 1.0}, r"loss.tv_threshold_low must be in \(0, 1\), got 1.0"),
        ({"tv_threshold_high": 0.0}, r"loss.tv_threshold_high must be in \(0, 1\), got 0.0"),
        ({"ratio_cap": 0.0}, "loss.ratio_cap must be > 0, got 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + message):
        composed(DPPO, **changes)
