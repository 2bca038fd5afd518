"""PPO: golden numbers and reductions."""

from __future__ import annotations

import torch

from asynctensorrlhf.losses.ppo import compute_ppo_loss


def test_loss_gradient_and_metrics_equal_the_golden_vector(golden):
    vector = golden("ppo_clip_token_mean")
    policy, *rest = vector.plain()
    output = compute_ppo_loss(policy, *rest)
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
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
