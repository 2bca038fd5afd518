"""The frame: what is weighted, what the mean counts, regularisers, refusals, and defaults of the functions."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml

from asynctensorrlhf.losses.grpo import compute_grpo_loss
from asynctensorrlhf.losses.policy_loss import PLAIN, whole_batch
from asynctensorrlhf.losses.ppo import PPO, compute_ppo_loss
from tests.losses.composed import CORRECTIONS, FRAME, SETTINGS, annotated, composed, full_inputs, run

CONF = Path(__file__).parents[2] / "conf" / "loss"


def test_kl_in_the_loss_equals_the_golden_vector(golden):
    vector = golden("grpo_population_std_k3_kl")
    policy = vector.inputs["logp_new"].clone().requires_grad_()
    advantages = torch.tensor(vector.expected["advantages"], dtype=vector.dtype)
    inputs = whole_batch(
        policy, vector.inputs["logp_old"], advantages, vector.mask, ref_logprobs=vector.inputs["logp_ref"]
    )
    output = composed(clip_eps_high=0.2, dual_clip=None, aggregation="seq_mean_token_mean", kl_coef=0.04)(inputs)
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["loss/policy"], "policy_loss")
    vector.check(output.metrics["kl/loss"], "kl_loss")
    vector.check(output.metrics["kl/ref_k3"], "kl_token_mean")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")


@pytest.mark.parametrize(("action", "correction"), [("mask", "decoupled"), ("clamp", "cap"), ("none", "none")])
def test_decoupled_ppo_equals_the_golden_vector(golden, action, correction):
    vector = golden("decoupled_ppo")
    policy = vector.inputs["logp_new"].clone().requires_grad_()
    choices = {
        "decoupled": CORRECTIONS["decoupled"],
        "cap": replace(CORRECTIONS["tis"], cap=5.0),
        "none": replace(CORRECTIONS["tis"], cap=None),
    }
    loss = composed(clip_eps_high=0.2, dual_clip=None, proximal="recompute", correction=choices[correction])
    proximal = vector.inputs["logp_prox"]
    inputs = whole_batch(
        policy, vector.inputs["logp_behave"], vector.inputs["advantages"], vector.mask, proximal_logprobs=proximal
    )
    output = loss(inputs)
    output.loss.backward()
    vector.check(output.loss, "actions", action, "loss")
    vector.check(policy.grad, "actions", action, "grad_logp_new")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")
    if action != "none":
        vector.check(output.metrics["correction/changed_fraction"], "frac_over_cap")


def test_without_recomputed_log_probs_the_policy_is_its_own_proximal_policy():
    loss, inputs = composed(proximal="recompute", correction=CORRECTIONS["tis"]), full_inputs()
    at_the_first_update = replace(inputs, proximal_logprobs=None)
    output, gradients = run(loss, annotated(loss, at_the_first_update))
    explicit = replace(inputs, proximal_logprobs=inputs.policy_logprobs)
    expected, expected_gradients = run(loss, annotated(loss, explicit))
    assert output.metrics["loss/clip_fraction"] == 0
    assert torch.equal(output.loss, expected.loss)
    assert torch.equal(gradients, expected_gradients)


def test_ratio_metrics_compare_with_the_sampler_whatever_the_proximal_policy():
    inputs = full_inputs()
    metrics = [run(composed(proximal=proximal), inputs)[0].metrics for proximal in ("rollout", "recompute")]
    assert metrics[0]["ratio/mean"] == metrics[1]["ratio/mean"]
    assert metrics[0]["loss/clip_fraction"] != metrics[1]["loss/clip_fraction"]


def test_rejected_tokens_stay_in_the_denominator():
    mask = torch.ones(1, 2, dtype=torch.bool)
    policy = torch.zeros(1, 2, requires_grad=True)
    behaviour = torch.tensor([[0.0, -2.0]])  # ratios 1 and 7.4 of proximal over sampler
    loss = composed(proximal="recompute", correction=CORRECTIONS["decoupled"])
    inputs = whole_batch(policy, behaviour, torch.ones(1, 2), mask, proximal_logprobs=torch.zeros(1, 2))
    output = loss(inputs)
    output.loss.backward()
    assert output.loss.item() == -0.5
    assert policy.grad.tolist() == [[-0.5, 0.0]]
    assert output.metrics["correction/changed_fraction"] == output.metrics["correction/weight_mean"] == 0.5


def test_an_unbiased_kl_is_weighted_by_policy_over_sampler(golden):
    vector = golden("kl_estimators")
    policy = vector.inputs["logp_new"].clone().requires_grad_()
    reference = vector.inputs["logp_ref"]
    inputs = whole_batch(
        policy, vector.inputs["logp_old"], torch.zeros_like(reference), vector.mask, ref_logprobs=reference
    )
    output = composed(kl_coef=1.0, kl_estimator="k3_unbiased", aggregation="token_sum")(inputs)
    output.loss.backward()
    expected = vector.expected["tokens"]["k3_is_unbiased"]
    assert output.loss.item() == pytest.approx(sum(expected["value"][0]), rel=2e-5)
    vector.check(policy.grad, "tokens", "k3_is_unbiased", "grad")


class OverTwoTokens(PPO):
    """PPO whose mean over tokens divides by 2, whatever the batch."""

    def surrogate(self, terms):
        """PPO's, with its own denominator."""
        return replace(super().surrogate(terms), num_tokens=2.0)


def test_a_trust_region_can_bring_the_denominator_of_the_policy_loss_but_not_of_the_kl():
    inputs = full_inputs()
    frame = {**FRAME, **SETTINGS[PPO], "kl_coef": 1.0}
    output, expected = run(OverTwoTokens(**frame), inputs)[0], run(PPO(**frame), inputs)[0]
    num_tokens = inputs.loss_mask.sum()
    torch.testing.assert_close(output.metrics["loss/policy"] * 2, expected.metrics["loss/policy"] * num_tokens)
    assert output.metrics["kl/loss"] == expected.metrics["kl/loss"]


def test_the_kl_term_is_scaled_and_added_and_the_entropy_subtracted():
    inputs = full_inputs()
    plain = run(composed(), inputs)[0].loss
    kl = run(composed(kl_coef=1.0), inputs)[0]
    torch.testing.assert_close(kl.loss, plain + kl.metrics["kl/loss"])
    scaled = run(composed(kl_coef=0.5), replace(inputs, kl_scale=3.0))[0].loss
    torch.testing.assert_close(scaled, plain + 1.5 * kl.metrics["kl/loss"])
    entropy, gradients = run(composed(entropy_coef=0.1), inputs)
    mean = inputs.entropy[inputs.loss_mask].mean()
    torch.testing.assert_close(entropy.metrics["entropy/loss"], mean)
    torch.testing.assert_close(entropy.loss, plain - 0.1 * mean)
    torch.testing.assert_close(gradients[1], -0.1 * inputs.loss_mask.double() / inputs.loss_mask.sum())


def test_a_loss_with_kl_or_entropy_asks_for_what_is_missing():
    inputs = full_inputs()
    with pytest.raises(ValueError, match=r"loss.kl_coef=0.1 needs ref_logprobs, got none"):
        composed(kl_coef=0.1)(replace(inputs, ref_logprobs=None))
    with pytest.raises(ValueError, match=r"loss.entropy_coef=0.1 needs entropy, got none"):
        composed(entropy_coef=0.1)(replace(inputs, entropy=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"proximal": "old"}, "loss.proximal must be one of rollout, recompute, loglinear, got 'old'"),
        ({"kl_estimator": "k4"}, "loss.kl_estimator must be one of k1, k2, k3, k3_plus, .*, got 'k4'"),
        ({"aggregation": "mean"}, "loss.aggregation must be one of token_mean"),
        ({"kl_coef": -0.1}, "loss.kl_coef must be >= 0 and finite, got -0.1"),
        ({"kl_coef": math.nan}, "loss.kl_coef must be >= 0 and finite, got nan"),
        ({"entropy_coef": math.inf}, "loss.entropy_coef must be finite, got inf"),
        (
            {"correction": CORRECTIONS["tis"]},
            "loss.correction corrects twice with loss.proximal=rollout.*use loss.proximal=recompute or loglinear, or "
            "loss/correction=none",
        ),
    ],
)
def test_a_composition_that_cannot_work_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + message):
        composed(**changes)


def from_config(*names):
    """Keys of these files, later ones win, without what only Hydra reads."""
    merged = {}
    for name in names:
        merged |= yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return {key: value for key, value in merged.items() if key not in ("defaults", "_target_")}


@pytest.mark.parametrize(
    ("names", "compute"),
    [(("frame/default", "ppo"), compute_ppo_loss), (("frame/default", "ppo", "grpo"), compute_grpo_loss)],
    ids=["ppo", "grpo"],
)
def test_the_functions_default_to_what_the_config_says(names, compute):
    config = from_config(*names)
    assert {field.name for field in fields(PPO)} == config.keys() | {"correction"}
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(compute).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    stages = {name: value for name, value in PLAIN.items() if name != "correction"}
    assert {**stages, **defaults} == {name: config[name] for name in {**stages, **defaults}}
    assert not PLAIN["correction"].is_active
