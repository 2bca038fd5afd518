"""Whitening: moments over the mask alone, degenerate batches, and no wait for the device."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.advantages.whitening import whiten
from tests.losses.conftest import TOLERANCE, Golden

MASK = torch.tensor([[True, True, False], [True, False, True]])
VALUES = torch.tensor([[1.0, 2.0, math.nan], [4.0, math.inf, -3.0]], dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_whitened_advantages_equal_the_golden_vector(dtype):
    vector = Golden("gae_value_clip", dtype)
    advantages = torch.tensor(vector.expected["advantages"], dtype=dtype)
    vector.check(whiten(advantages, vector.mask), "advantages_whitened")


def test_masked_values_have_mean_zero_and_variance_one_and_the_rest_is_zero():
    whitened = whiten(VALUES, MASK)
    assert whitened[~MASK].tolist() == [0.0, 0.0]
    assert whitened[MASK].mean().item() == pytest.approx(0, abs=1e-12)
    assert whitened[MASK].std().item() == pytest.approx(1, abs=1e-6)


def test_without_the_shift_only_the_scale_changes():
    scaled = whiten(VALUES, MASK, shift_mean=False)
    assert scaled[MASK].mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(scaled[MASK] - 1.0, whiten(VALUES, MASK)[MASK])
    assert scaled[~MASK].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mask", [[[True, False]], [[False, False]]])
def test_one_value_or_none_is_whitened_to_zero(mask):
    assert whiten(torch.tensor([[7.0, 1.0]]), torch.tensor(mask)).tolist() == [[0.0, 0.0]]


def test_sums_are_taken_in_double_precision():
    values = 1e6 + torch.tensor([[0.0, 1.0]]).repeat(1, 5000)
    whitened = whiten(values, torch.ones_like(values, dtype=torch.bool))
    assert whitened.dtype == torch.float32
    assert whitened[0, :2].tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)


def test_it_never_asks_the_device_for_a_value():
    assert whiten(VALUES.to("meta"), MASK.to("meta")).is_meta
