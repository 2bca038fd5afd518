"""Metrics of the log-ratio: binding clips only, moments, and what silent samples change."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.diagnostics import (
    clip_fractions,
    is_exact_without_silent_samples,
    ratio_maxima,
    ratio_moments,
)

RATIOS = [0.5, 1.0, 1.5, 10.0]
DELTA = torch.tensor([RATIOS, RATIOS], dtype=torch.float64).log()
ADVANTAGES = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "global_num_tokens": 8.0}


def test_clip_fractions_count_only_the_clips_that_bind():
    fractions = clip_fractions(DELTA, ADVANTAGES, dual_clip=3.0, **CLIP)
    assert {name: value.item() for name, value in fractions.items()} == {
        "loss/clip_fraction_low": 1 / 8,
        "loss/clip_fraction_high": 2 / 8,
        "loss/clip_fraction_dual": 1 / 8,
    }


def test_the_dual_clip_is_reported_only_where_there_is_one():
    assert "loss/clip_fraction_dual" not in clip_fractions(DELTA, ADVANTAGES, **CLIP)


def test_moments_of_hand_computed_ratios():
    delta = torch.tensor([[math.log(2.0), -20.0, 5.0]], dtype=torch.float64)
    moments = ratio_moments(delta, torch.tensor([[True, True, False]]), global_num_tokens=2.0)
    small = math.exp(-20)
    expected = {
        "ratio/mean": (2 + small) / 2,
        "ratio/m2_ratio": (4 + small**2) / 2,
        "ratio/m2_log_ratio": (math.log(2) ** 2 + 400) / 2,
        "ratio/approx_kl_k1": (20 - math.log(2)) / 2,
        "ratio/approx_kl_k3": (2 - 1 - math.log(2) + small - 1 + 20) / 2,
        "ratio/clamped_fraction": 1 / 2,
    }
    assert {name: value.item() for name, value in moments.items()} == pytest.approx(expected, rel=1e-12)


def test_equal_policies_have_ratio_one_and_no_divergence():
    moments = ratio_moments(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), global_num_tokens=6.0)
    ones = {"ratio/mean", "ratio/m2_ratio"}
    assert all(value.item() == (name in ones) for name, value in moments.items())


def test_the_low_variance_kl_is_never_negative_for_tiny_float32_ratios():
    delta = torch.linspace(-1e-3, 1e-3, 201)[None]
    for token in delta.T:
        moment = ratio_moments(token[None], torch.ones(1, 1, dtype=torch.bool), global_num_tokens=1.0)
        assert moment["ratio/approx_kl_k3"] >= 0


@pytest.mark.parametrize(("delta", "largest"), [([[-3.0, 2.0]], 3.0), ([[]], 0.0)], ids=["tokens", "none"])
def test_the_largest_log_ratio_is_absolute_and_zero_of_nothing(delta, largest):
    assert ratio_maxima(torch.tensor(delta))["ratio/abs_log_ratio_max"].item() == largest


def test_metrics_said_to_be_exact_do_not_change_when_silent_samples_are_left_out():
    advantages = ADVANTAGES.clone()
    advantages[1] = 0.0
    mask = torch.ones(2, 4, dtype=torch.bool)
    every = clip_fractions(DELTA, advantages, **CLIP) | ratio_moments(DELTA, mask, global_num_tokens=8.0)
    heard = clip_fractions(DELTA[:1], advantages[:1], **CLIP) | ratio_moments(
        DELTA[:1], mask[:1], global_num_tokens=8.0
    )
    unchanged = {name for name in every if every[name] == heard[name]}
    exact = {name for name in every if is_exact_without_silent_samples(name)}
    assert exact == {"loss/clip_fraction_low", "loss/clip_fraction_high"} <= unchanged
    assert not unchanged - exact - {"ratio/clamped_fraction"}
