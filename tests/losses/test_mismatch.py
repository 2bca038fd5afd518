"""How far two sets of log-probs lie apart: golden numbers, mask, precision."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.mismatch import mismatch_metrics

NAMES = {
    "k1": "kl_k1_rollout_train",
    "k2": "kl_k2",
    "k3": "kl_k3_rollout_train",
    "m2_log_ratio": "m2_log_ratio",
    "m2_ratio": "m2_ratio",
    "chi2_token": "chi2_token",
    "pearson_chi2_token": "pearson_chi2_token",
    "chi2_sequence": "chi2_seq",
    "ess_token": "ess_token",
    "ess_sequence": "ess_sequence",
    "weight_mean": "is_weight_mean",
    "weight_max": "is_weight_max",
    "weight_min": "is_weight_min",
    "abs_log_ratio_mean": "mean_abs_logprob_diff",
    "abs_log_ratio_max": "max_abs_logprob_diff",
    "abs_prob_mean": "mean_abs_prob_diff",
    "mult_prob_error": "token_mult_prob_error",
    "policy_ppl": "training_ppl",
    "behaviour_ppl": "rollout_ppl",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "ppl_ratio": "ppl_ratio",
}


def test_every_figure_equals_the_golden_vector(golden):
    vector = golden("offpolicy_diagnostics")
    metrics = mismatch_metrics(vector.inputs["logp_train"], vector.inputs["logp_rollout"], vector.mask)
    assert metrics.keys() == {f"mismatch/{name}" for name in NAMES}
    for name, expected in NAMES.items():
        vector.check(metrics[f"mismatch/{name}"], expected)


def test_all_of_the_vector_but_staleness_is_covered(golden):
    missing = golden("offpolicy_diagnostics").expected.keys() - set(NAMES.values())
    assert all(name.startswith("staleness_") for name in missing)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, -1000.0])
def test_masked_positions_and_rows_change_no_bit(golden, poison):
    vector = golden("offpolicy_diagnostics")
    plain = [vector.inputs[name] for name in ("logp_train", "logp_rollout")]
    padded = [
        torch.nn.functional.pad(torch.where(vector.mask, value, poison), (0, 0, 0, 1), value=poison) for value in plain
    ]
    mask = torch.nn.functional.pad(vector.mask, (0, 0, 0, 1))
    metrics, clean = mismatch_metrics(*padded, mask), mismatch_metrics(*plain, vector.mask)
    for name, value in clean.items():
        torch.testing.assert_close(metrics[name], value, msg=name)


def test_equal_log_probs_have_no_mismatch():
    logprobs = -torch.rand(3, 4)
    metrics = mismatch_metrics(logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool))
    ones = {
        "m2_ratio",
        "ess_token",
        "ess_sequence",
        "weight_mean",
        "weight_max",
        "weight_min",
        "mult_prob_error",
        "ppl_ratio",
    }
    for name, value in metrics.items():
        short = name.removeprefix("mismatch/")
        if short not in ("policy_ppl", "behaviour_ppl"):
            assert value.item() == pytest.approx(float(short in ones), abs=1e-6), name


def test_figures_are_float32_constants_of_low_precision_log_probs():
    policy = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    behaviour = torch.tensor([[-1.001, -2.002]])
    metrics = mismatch_metrics(policy, behaviour, torch.ones(1, 2, dtype=torch.bool))
    assert {value.dtype for value in metrics.values()} == {torch.float32}
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics["mismatch/abs_prob_mean"].item() == pytest.approx((0.000368 + 0.00027) / 2, rel=0.01)


def test_a_live_nan_shows():
    logprobs = torch.tensor([[math.nan, -1.0]])
    metrics = mismatch_metrics(logprobs, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    finite = {name for name, value in metrics.items() if value.isfinite()}
    assert finite == {"mismatch/behaviour_ppl"}


def test_extreme_log_ratios_stay_finite():
    policy, behaviour = torch.tensor([[-0.1, -500.0]]), torch.tensor([[-500.0, -0.1]])
    metrics = mismatch_metrics(policy, behaviour, torch.ones(1, 2, dtype=torch.bool))
    ppl = {"mismatch/policy_ppl", "mismatch/behaviour_ppl"}  # exp of 250 nats a token is honestly infinite
    assert all(value.isfinite() for name, value in metrics.items() if name not in ppl)


def test_it_never_asks_the_device_for_a_value():
    logprobs, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert all(value.is_meta for value in mismatch_metrics(logprobs, logprobs, mask).values())
