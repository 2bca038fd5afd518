"""PPO: golden numbers and reductions."""

from __future__ import annotations

import pytest
import torch

from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.ppo import compute_ppo_loss
from asynctensorrlhf.losses.surrogate import clipped_surrogate, log_ratio
from tests.losses.composed import composed


def test_loss_gradient_and_metrics_equal_the_golden_vector(golden):
    vector = golden("ppo_clip_token_mean")
    policy, *rest = vector.plain()
    output = compute_ppo_loss(policy, *rest)
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")
    vector.check(output.metrics["loss/clip_fraction_low"], "clip_frac_low")
    vector.check(output.metrics["loss/clip_fraction_high"], "clip_frac_high")
    vector.check(output.metrics["ratio/approx_kl_k1"], "approx_kl_k1")
    vector.check(output.metrics["ratio/m2_log_ratio"] / 2, "approx_kl_k2")
    vector.check(output.metrics["ratio/approx_kl_k3"], "approx_kl_k3")


def test_clip_higher_and_dual_clip_equal_the_golden_vector(golden):
    vector = golden("ppo_clip_higher_dual_clip")
    policy, *rest = vector.plain()
    output = compute_ppo_loss(policy, *rest, clip_eps_high=0.28, dual_clip=3.0, aggregation="seq_mean_token_mean")
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")
    vector.check(output.metrics["loss/clip_fraction_dual"], "clip_frac_lower_dual")


def test_extreme_log_ratios_equal_the_golden_vector(golden):
    vector = golden("extreme_log_ratios")
    policy, *rest = vector.plain()
    output = compute_ppo_loss(policy, *rest, dual_clip=3.0)
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    assert output.metrics["ratio/clamped_fraction"].item() == 0.5
    assert output.maxima["ratio/abs_log_ratio_max"].item() == 20.0


def test_on_policy_it_is_reinforce(make_inputs):
    inputs = make_inputs(spread=0.0)
    output = compute_ppo_loss(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.advantages, inputs.loss_mask)
    output.loss.backward()
    reinforce = -torch.where(inputs.loss_mask, inputs.advantages, 0.0) / inputs.loss_mask.sum()
    torch.testing.assert_close(inputs.policy_logprobs.grad, reinforce)


def test_one_advantage_per_sample_holds_for_its_tokens(make_inputs):
    inputs = make_inputs()
    plain = (inputs.policy_logprobs, inputs.behaviour_logprobs)
    per_sample = inputs.advantages[:, 0]
    spread_out = per_sample[:, None].expand_as(inputs.loss_mask)
    a = compute_ppo_loss(*plain, per_sample, inputs.loss_mask)
    b = compute_ppo_loss(*plain, spread_out, inputs.loss_mask)
    assert a.loss == b.loss


@pytest.mark.parametrize(
    ("vector_id", "options"),
    [
        ("ppo_clip_token_mean", {"clip_eps_high": 0.2}),
        ("ppo_clip_higher_dual_clip", {"clip_eps_high": 0.28, "dual_clip": 3.0}),
        ("extreme_log_ratios", {"clip_eps_high": 0.2, "dual_clip": 3.0}),
    ],
)
def test_ratios_and_losses_of_tokens_equal_the_golden_vectors(golden, vector_id, options):
    vector = golden(vector_id)
    delta = log_ratio(vector.inputs["logp_new"], vector.inputs["logp_old"], vector.mask, limit=20.0)
    per_token = clipped_surrogate(delta, vector.inputs["advantages"], clip_eps_low=0.2, **options)
    vector.check(delta.exp() * vector.mask, "ratio")
    vector.check(per_token * vector.mask, "per_token_loss")


def test_one_batch_of_all_quadrants_has_the_hand_computed_loss_gradient_and_fractions():
    policy = torch.tensor([[0.5, 1.0, 1.5, 10.0]] * 2, dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    output = composed(aggregation="token_sum")(whole_batch(policy, torch.zeros_like(policy), advantages, mask))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-0.5 - 1 - 1.28 - 1.28 + 0.8 + 1 + 1.5 + 3)
    expected = torch.tensor([[-0.5, -1.0, 0.0, 0.0], [0.0, 1.0, 1.5, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(policy.grad, expected)
    fractions = {name: value.item() for name, value in output.metrics.items() if "clip" in name}
    assert fractions == {
        "loss/clip_fraction": 3 / 8,
        "loss/clip_fraction_low": 1 / 8,
        "loss/clip_fraction_high": 2 / 8,
        "loss/clip_fraction_dual": 1 / 8,
    }
