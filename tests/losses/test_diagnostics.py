"""Metrics of the log-ratio: binding clips only, moments, extremes, and what silent samples change."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.diagnostics import clip_fractions, derived, is_exact_without_silent_samples, ratio_metrics
from asynctensorrlhf.losses.surrogate import log_ratio

RATIOS = [0.5, 1.0, 1.5, 10.0]
DELTA = torch.tensor([RATIOS, RATIOS], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "global_num_tokens": 8.0}
SUMS = {
    "ratio/approx_kl_k1": "kl_k1_rollout_train",
    "ratio/approx_kl_k3": "kl_k3_rollout_train",
    "ratio/m2_log_ratio": "m2_log_ratio",
    "ratio/m2_ratio": "m2_ratio",
    "ratio/mean": "is_weight_mean",
    "ratio/abs_log_ratio_mean": "mean_abs_logprob_diff",
    "ratio/mult_prob_error": "token_mult_prob_error",
    "ratio/chi2_token": "chi2_token",
    "ratio/chi2_sequence": "chi2_seq",
    "ratio/ess_token": "ess_token",
    "ratio/ess_sequence": "ess_sequence",
    "ratio/log_ppl_diff": "log_ppl_diff",
    "ratio/log_ppl_abs_diff": "log_ppl_abs_diff",
    "ratio/ppl_ratio": "ppl_ratio",
}


def test_every_figure_equals_the_golden_vector(golden):
    vector = golden("offpolicy_diagnostics")
    delta = log_ratio(vector.inputs["logp_train"], vector.inputs["logp_rollout"], vector.mask)
    sums, maxima, minima = ratio_metrics(delta, vector.mask, global_num_tokens=vector.mask.sum())
    whole = derived({name: value.item() for name, value in sums.items()})
    for name, expected in SUMS.items():
        vector.check(torch.tensor(whole[name], dtype=torch.float64), expected)
    vector.check(maxima["ratio/max"], "is_weight_max")
    vector.check(minima["ratio/min"], "is_weight_min")
    vector.check(maxima["ratio/abs_log_ratio_max"], "max_abs_logprob_diff")
    std = math.sqrt(vector.expected["m2_ratio"] - vector.expected["is_weight_mean"] ** 2)
    assert whole["ratio/std"] == pytest.approx(std, rel=1e-5)


def test_derived_figures_come_from_the_sums_of_all_parts():
    delta, mask = DELTA * torch.tensor([[1.0], [-0.5]]), torch.ones(2, 4, dtype=torch.bool)
    parts = [ratio_metrics(delta[row], mask[row], global_num_tokens=8.0)[0] for row in (slice(0, 1), slice(1, 2))]
    added = derived({name: sum(part[name].item() for part in parts) for name in parts[0]})
    whole = ratio_metrics(delta, mask, global_num_tokens=8.0)[0]
    assert added == pytest.approx(derived({name: value.item() for name, value in whole.items()}))


def test_parts_that_only_serve_a_derived_figure_are_not_logged():
    sums = ratio_metrics(DELTA, torch.ones(2, 4, dtype=torch.bool), global_num_tokens=8.0)[0]
    assert any(name.startswith("_") for name in sums)
    whole = derived({**{name: value.item() for name, value in sums.items()}, "loss/policy": 0.25})
    assert not any(name.startswith("_") for name in whole)
    assert whole["loss/policy"] == 0.25
    assert derived({"train/entropy": 1.5}) == {"train/entropy": 1.5}


def test_sums_over_nothing_derive_finite_figures():
    sums = ratio_metrics(DELTA, torch.zeros(2, 4, dtype=torch.bool), global_num_tokens=0.0)[0]
    whole = derived({name: value.item() for name, value in sums.items()})
    assert all(math.isfinite(value) for value in whole.values())
    assert whole["ratio/ess_token"] == 0.0


def test_effective_sizes_of_hand_computed_weights():
    delta = torch.tensor([[3.0, 1.0], [1.0, 1.0]], dtype=torch.float64).log()
    sums = ratio_metrics(delta, torch.ones(2, 2, dtype=torch.bool), global_num_tokens=4.0)[0]
    whole = derived({name: value.item() for name, value in sums.items()})
    assert whole["ratio/ess_token"] == pytest.approx((6 / 4) ** 2 / (12 / 4))
    assert whole["ratio/ess_sequence"] == pytest.approx((4 / 2) ** 2 / (10 / 2))
    assert whole["ratio/chi2_sequence"] == pytest.approx(10 / 2 - 1)


def test_clip_fractions_count_only_the_clips_that_bind():
    fractions = clip_fractions(DELTA, ADVANTAGES, dual_clip=3.0, **CLIP)
    assert {name: value.item() for name, value in fractions.items()} == {
        "loss/clip_fraction": 3 / 8,
        "loss/clip_fraction_low": 1 / 8,
        "loss/clip_fraction_high": 2 / 8,
        "loss/clip_fraction_dual": 1 / 8,
    }


def test_the_dual_clip_is_reported_only_where_there_is_one():
    assert "loss/clip_fraction_dual" not in clip_fractions(DELTA, ADVANTAGES, **CLIP)


def test_moments_of_hand_computed_ratios():
    delta = torch.tensor([[math.log(2.0), -20.0, 0.0]], dtype=torch.float64)
    sums = ratio_metrics(delta, torch.tensor([[True, True, False]]), global_num_tokens=2.0)[0]
    small = math.exp(-20)
    expected = {
        "ratio/mean": (2 + small) / 2,
        "ratio/m2_ratio": (4 + small**2) / 2,
        "ratio/m2_log_ratio": (math.log(2) ** 2 + 400) / 2,
        "ratio/approx_kl_k1": (20 - math.log(2)) / 2,
        "ratio/approx_kl_k3": (2 - 1 - math.log(2) + small - 1 + 20) / 2,
        "ratio/abs_log_ratio_mean": (math.log(2) + 20) / 2,
        "ratio/mult_prob_error": (2 + math.exp(20)) / 2,
        "ratio/clamped_fraction": 1 / 2,
    }
    assert {name: value.item() for name, value in sums.items() if name[0] != "_"} == pytest.approx(expected, rel=1e-12)


def test_the_low_variance_kl_is_never_negative_for_tiny_float32_ratios():
    delta = torch.linspace(-1e-3, 1e-3, 201)[None]
    for token in delta.T:
        sums = ratio_metrics(token[None], torch.ones(1, 1, dtype=torch.bool), global_num_tokens=1.0)[0]
        assert sums["ratio/approx_kl_k3"] >= 0


@pytest.mark.parametrize(
    ("delta", "mask", "largest", "high", "low"),
    [
        ([[-3.0, 2.0]], [[True, True]], 3.0, math.exp(2.0), math.exp(-3.0)),
        ([[0.5, 0.0]], [[True, False]], 0.5, math.exp(0.5), math.exp(0.5)),
        ([[0.0, 0.0]], [[False, False]], 0.0, 0.0, math.inf),
        ([[]], [[]], 0.0, 0.0, math.inf),
    ],
    ids=["tokens", "padding", "masked", "none"],
)
def test_extremes_are_of_trained_tokens_and_neutral_where_there_are_none(delta, mask, largest, high, low):
    delta, mask = torch.tensor(delta, dtype=torch.float64), torch.tensor(mask, dtype=torch.bool)
    _, maxima, minima = ratio_metrics(delta, mask, global_num_tokens=1.0)
    assert maxima["ratio/abs_log_ratio_max"].item() == largest
    assert maxima["ratio/max"].item() == pytest.approx(high)
    assert minima["ratio/min"].item() == pytest.approx(low)


def test_a_live_nan_shows_in_extremes_and_sums():
    sums, maxima, minima = ratio_metrics(
        torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2, dtype=torch.bool), global_num_tokens=2.0
    )
    assert all(value.isnan() for value in (sums["ratio/mean"], *maxima.values(), *minima.values()))


def test_metrics_said_to_be_exact_do_not_change_when_silent_samples_are_left_out():
    advantages = ADVANTAGES.clone()
    advantages[1] = 0.0
    mask = torch.ones(2, 4, dtype=torch.bool)
    every = clip_fractions(DELTA, advantages, **CLIP) | ratio_metrics(DELTA, mask, global_num_tokens=8.0)[0]
    heard = (
        clip_fractions(DELTA[:1], advantages[:1], **CLIP) | ratio_metrics(DELTA[:1], mask[:1], global_num_tokens=8.0)[0]
    )
    unchanged = {name for name in every if every[name] == heard[name]}
    exact = {name for name in every if is_exact_without_silent_samples(name)}
    assert exact == {"loss/clip_fraction", "loss/clip_fraction_low", "loss/clip_fraction_high"}
    assert unchanged - exact == {"ratio/clamped_fraction"}
