"""Ratios of whole sequences: exp of a sum or of a mean, never a sum of exps."""

from __future__ import annotations

import pytest
import torch

from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio, product_log_ratio

DELTA = torch.tensor([[0.9, 0.1, 0.0], [-0.3, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, False], [False] * 3])


def test_the_product_is_the_sum_of_logs_and_the_geometric_mean_their_mean():
    assert product_log_ratio(DELTA, MASK).tolist() == pytest.approx([1.0, -0.3, 0.0])
    assert geometric_log_ratio(DELTA, MASK).tolist() == pytest.approx([0.5, -0.3, 0.0])


def test_a_long_product_is_clamped_so_that_its_exp_is_finite():
    delta = torch.full((2, 100), 20.0) * torch.tensor([[1.0], [-1.0]])
    mask = torch.ones_like(delta, dtype=torch.bool)
    assert product_log_ratio(delta, mask).tolist() == [20.0, -20.0]
    assert geometric_log_ratio(delta, mask).tolist() == [20.0, -20.0]


def test_repeating_a_sequence_keeps_its_geometric_mean_and_doubles_its_log_product():
    twice = torch.cat([DELTA[:1, :2], DELTA[:1, :2]], dim=1)
    mask = torch.ones_like(twice, dtype=torch.bool)
    assert product_log_ratio(twice, mask).item() == pytest.approx(2.0)
    assert geometric_log_ratio(twice, mask).item() == pytest.approx(0.5)
