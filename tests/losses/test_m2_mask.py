"""M2PO's masks and radii against the algorithms as they are published: greedy, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.losses.m2_mask import (
    adaptive_radii,
    below_threshold,
    mean_over,
    second_moment_mask,
    trust_region_tokens,
)
from asynctensorrlhf.losses.surrogate import log_ratio

log_ratios = st.lists(st.floats(-3, 3, allow_nan=False).map(lambda x: round(x, 3)), min_size=1, max_size=12)


def row(values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def greedy_mask(delta, eligible, threshold, *, strict):
    """Algorithm 1 as it is written: while the mean is too large, remove the largest."""
    left = [place for place, is_eligible in enumerate(eligible) if is_eligible]
    dropped = set()

    def is_too_large():
        mean = sum(delta[place] ** 2 for place in left) / len(left) if left else 0.0
        return mean >= threshold if strict else mean > threshold

    while len(left) > int(strict) and is_too_large():
        largest = max(left, key=lambda place: (delta[place] ** 2, place))
        left.remove(largest)
        dropped.add(largest)
    return [place not in dropped for place in range(len(delta))]


def released_tau(delta, eligible, budget):
    """`_solve_tau_from_sorted_delta2` of the authors, with 0 where their loop has no token before."""
    v = sorted(d * d for d, is_eligible in zip(delta, eligible, strict=True) if is_eligible)
    if not v or sum(v) / len(v) <= budget:
        return math.inf
    for k in range(len(v)):
        if v[k] * (len(v) - k - 1) + sum(v[: k + 1]) >= budget * len(v):
            return math.sqrt(max(v[k - 1] - 1e-12, 0.0)) if k else 0.0
    raise AssertionError("the last one holds all of the sum")


@given(delta=log_ratios, data=st.data(), strict=st.booleans(), threshold=st.sampled_from([0.01, 0.04, 0.5, 2.0]))
@settings(max_examples=100, deadline=None)
def test_the_mask_is_that_of_removing_the_largest_until_the_mean_fits(delta, data, strict, threshold):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(delta), max_size=len(delta)))
    keep = second_moment_mask(
        row(delta), torch.tensor([eligible]), torch.ones(1, len(delta), dtype=torch.bool), threshold, strict=strict
    )
    assert keep[0].tolist() == greedy_mask(delta, eligible, threshold, strict=strict)


@given(delta=log_ratios, data=st.data(), budget=st.sampled_from([0.01, 0.04, 0.5, 2.0]))
@settings(max_examples=100, deadline=None)
def test_the_radii_are_those_of_the_released_solver(delta, data, budget):
    eligible = data.draw(st.lists(st.booleans(), min_size=len(delta), max_size=len(delta)))
    found = adaptive_radii(row(delta), torch.tensor([eligible]), budget)
    tau = released_tau(delta, eligible, budget)
    assert found.tau.item() == pytest.approx(tau, abs=1e-9)
    assert found.clip_eps_low.item() == pytest.approx(1 - math.exp(-tau), abs=1e-9)
    assert found.clip_eps_high.item() == pytest.approx(math.expm1(tau), abs=1e-8)


@pytest.mark.parametrize(
    "case", ["no_masking_needed", "empty_trust_region", "single_huge_token", "zero_advantage_ignored"]
)
def test_edge_cases_equal_the_golden_vector(case, golden_edges):
    threshold, given_case, expected = golden_edges(case)
    delta, advantages = row(given_case["log_ratio"][0]), row(given_case["advantages"][0])
    everything = torch.ones_like(delta, dtype=torch.bool)
    eligible = trust_region_tokens(delta, advantages, everything)
    keep = second_moment_mask(delta, eligible, everything, threshold, strict=False)
    assert keep.double().tolist() == expected["keep_mask"]
    assert eligible.sum().item() == expected["n_trust_region"]
    assert mean_over(delta.square(), eligible).item() == pytest.approx(expected["m2_before"])
    assert mean_over(delta.square(), eligible & keep).item() == pytest.approx(expected["m2_after"])


def test_the_mask_of_areal_equals_the_golden_vector(golden):
    vector = golden("m2po_areal_mask")
    delta = log_ratio(vector.inputs["logp_prox"], vector.inputs["logp_behave"], vector.mask)
    keep = second_moment_mask(delta, vector.mask, vector.mask, vector.config["m2_threshold"], strict=True)
    vector.check(keep, "keep_mask")
    vector.check(mean_over(delta.square(), vector.mask), "m2_before")
    vector.check(mean_over(delta.square(), keep), "m2_after")


def test_a_good_token_of_tiny_ratio_is_outside_the_trust_region_and_the_first_to_go_with_all():
    delta, advantages = row([0.9, 0.1, -0.8, 0.05, -2.0]), row([1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.ones(1, 5, dtype=torch.bool)
    eligible = trust_region_tokens(delta, advantages, mask)
    assert eligible.tolist() == [[True, True, True, True, False]]
    assert second_moment_mask(delta, eligible, mask, 0.04, strict=False).tolist() == [[False, True, False, True, True]]
    assert not second_moment_mask(delta, mask, mask, 1.0, strict=False)[0, 4]


def test_the_strict_rule_masks_a_mean_at_the_threshold_and_keeps_one_token():
    delta, mask = row([0.5, 0.5]), torch.ones(1, 2, dtype=torch.bool)
    assert second_moment_mask(delta, mask, mask, 0.25, strict=False).tolist() == [[True, True]]
    assert second_moment_mask(delta, mask, mask, 0.25, strict=True).tolist() == [[True, False]]


def test_padding_is_never_kept_nor_counted_whatever_it_holds():
    delta = row([0.1, 3.0, 0.2])
    mask = torch.tensor([[True, False, True]])
    keep = second_moment_mask(delta, torch.ones_like(mask), mask, 0.04, strict=False)
    assert keep.tolist() == mask.tolist()


def test_a_nan_log_ratio_stays_and_does_not_disturb_the_others():
    delta, mask = row([0.9, math.nan, 0.1]), torch.ones(1, 3, dtype=torch.bool)
    assert second_moment_mask(delta, mask, mask, 0.04, strict=False).tolist() == [[False, True, True]]
    assert below_threshold(delta, mask, 4.0).tolist() == [[False, True, True]]


def test_floors_bound_the_radii_from_below():
    delta, eligible = row([0.9, 0.1]), torch.ones(1, 2, dtype=torch.bool)
    found = adaptive_radii(delta, eligible, 0.04, floor_low=0.3, floor_high=0.5)
    assert (found.clip_eps_low.item(), found.clip_eps_high.item()) == (0.3, 0.5)
    assert adaptive_radii(delta, eligible, 0.04).clip_eps_high.item() == pytest.approx(math.expm1(0.1))


def test_sums_are_taken_in_double_precision():
    num = 200_000
    delta = torch.full((1, num), 0.2)  # the mean of d^2 is at the threshold
    everything = torch.ones_like(delta, dtype=torch.bool)
    threshold = float(torch.tensor(0.2).double().square()) * (1 + 1e-9)
    assert second_moment_mask(delta, everything, everything, threshold, strict=False).all()


def test_only_large_ratios_leave_whatever_the_sign_of_the_advantage():
    delta = torch.tensor([[2.0, 1.4, 1e-9], [2.0, 1.4, 1e-9]]).log()
    keep = below_threshold(delta, torch.ones(2, 3, dtype=torch.bool), 2.25)
    assert keep.tolist() == [[False, True, True]] * 2


def test_it_never_asks_the_device_for_a_value():
    delta, mask = torch.zeros(2, 3, device="meta"), torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert second_moment_mask(delta, mask, mask, 0.04, strict=True).is_meta
    assert adaptive_radii(delta, mask, 0.04).tau.is_meta
