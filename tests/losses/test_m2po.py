"""M2PO, ratio threshold: golden numbers, the mask, its denominator and its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from asynctensorrlhf.losses.m2po import M2PO, compute_m2po_loss
from asynctensorrlhf.losses.ppo import compute_ppo_loss
from asynctensorrlhf.losses.surrogate import log_ratio

LOSS = M2PO(ratio_sq_threshold=2.25, clip_eps_low=0.2, clip_eps_high=0.2)


def keep_of(inputs):
    delta = log_ratio(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.loss_mask)
    return LOSS.keep_mask(delta, inputs.advantages, inputs.loss_mask)


def test_loss_gradient_mask_and_metrics_equal_the_golden_vector(golden):
    vector = golden("m2po_ratio_threshold")
    policy, behaviour, advantages, mask = vector.plain()
    output = compute_m2po_loss(policy, behaviour, advantages, mask, ratio_sq_threshold=2.0)
    output.loss.backward()
    loss = M2PO(ratio_sq_threshold=2.0, clip_eps_low=0.2, clip_eps_high=0.2)
    keep = loss.keep_mask(log_ratio(policy, behaviour, mask), advantages, mask)
    vector.check(keep, "keep_mask")
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["ratio/m2_ratio"], "m2_ratio")
    vector.check(output.metrics["m2po/m2_ratio_kept"], "m2_ratio_kept")
    vector.check(output.metrics["m2po/masked_fraction"], "masked_frac")
    vector.check(output.metrics["loss/clip_fraction_low"] + output.metrics["loss/clip_fraction_high"], "clip_frac")
    assert output.metrics["m2po/kept_weight"].item() == pytest.approx(12 / vector.expected["n_kept"])


def test_with_every_token_masked_the_loss_is_zero_and_still_has_a_gradient(golden):
    policy, *rest = golden("m2po_ratio_threshold").plain()
    output = compute_m2po_loss(policy, *rest, ratio_sq_threshold=0.0)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert not policy.grad.any()
    assert output.metrics["m2po/masked_fraction"].item() == 1.0


def test_only_large_ratios_leave_whatever_the_sign_of_the_advantage():
    delta = torch.tensor([[2.0, 1.4, 1e-9], [2.0, 1.4, 1e-9]]).log()
    advantages = torch.tensor([[1.0] * 3, [-1.0] * 3])
    keep = LOSS.keep_mask(delta, advantages, torch.ones(2, 3, dtype=torch.bool))
    assert keep.tolist() == [[False, True, True]] * 2


def test_masked_tokens_are_neither_in_the_sum_nor_in_the_denominator():
    policy = torch.tensor([[2.5, 1.0, 1.0]]).log()
    plain = (policy, torch.zeros(1, 3), torch.tensor([-1.0]), torch.ones(1, 3, dtype=torch.bool))
    assert compute_m2po_loss(*plain).loss.item() == pytest.approx(1.0)
    assert compute_ppo_loss(*plain).loss.item() == pytest.approx(1.5)


def test_a_live_nan_stays_so_that_the_loss_shows_it(make_inputs):
    inputs = make_inputs()
    policy = inputs.policy_logprobs.detach().clone()
    policy[0, 0] = math.nan
    inputs = replace(inputs, policy_logprobs=policy)
    assert keep_of(inputs)[0, 0]
    assert LOSS(inputs).loss.isnan()
    assert LOSS(replace(inputs, keep_mask=keep_of(inputs))).loss.isnan()


def test_a_threshold_that_nothing_reaches_makes_it_ppo(make_inputs):
    inputs = make_inputs()
    plain = (inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.loss_mask)
    ppo, m2po = compute_ppo_loss(*plain), compute_m2po_loss(*plain, ratio_sq_threshold=1e30)
    torch.testing.assert_close(m2po.loss, ppo.loss)
    assert {name: m2po.metrics[name] for name in ppo.metrics} == ppo.metrics


def test_the_mask_is_a_constant(make_inputs):
    inputs = make_inputs(spread=1.0)
    keep = keep_of(inputs)
    assert not keep.requires_grad
    assert 0 < (inputs.loss_mask & ~keep).sum() < inputs.loss_mask.sum()
    LOSS(inputs).loss.backward()
    assert not inputs.policy_logprobs.grad[~keep].any()


def test_the_given_mask_and_count_are_used_instead_of_own_ones(make_inputs):
    inputs = make_inputs(spread=1.0)
    keep = torch.zeros_like(inputs.loss_mask)
    keep[1, 0] = keep[0, -1] = True  # the second is a padded position
    output = LOSS(replace(inputs, keep_mask=keep, global_num_kept_tokens=torch.tensor(4)))
    output.loss.backward()
    only = compute_ppo_loss(
        inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.advantages, keep & inputs.loss_mask
    )
    torch.testing.assert_close(output.loss, only.loss / 4)
    ratio = (inputs.policy_logprobs - inputs.behaviour_logprobs).detach().exp()
    torch.testing.assert_close(output.metrics["m2po/m2_ratio_kept"], ratio[1, 0].square() / 4)
    assert not inputs.policy_logprobs.grad[~keep].any()


def test_a_threshold_that_makes_the_upper_clip_dead_code_warns():
    with pytest.warns(UserWarning, match=r"loss.ratio_sq_threshold=1.44 .* would clip; above 1.44"):
        M2PO(ratio_sq_threshold=1.44, clip_eps_low=0.2, clip_eps_high=0.2)


def test_a_threshold_that_masks_the_sampler_itself_is_refused():
    with pytest.raises(ValueError, match=r"loss\.ratio_sq_threshold must be > 1, got 1\.0"):
        M2PO(ratio_sq_threshold=1.0, clip_eps_low=0.2, clip_eps_high=0.2)
