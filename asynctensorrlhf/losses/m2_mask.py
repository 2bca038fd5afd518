"""Which tokens M2PO masks, and how tight its authors' code clips: decisions over a whole batch, all constants.

Knows the second moment of log-ratios and the token sets it is taken over; does not know losses. Nothing asks the device
for a value: sets of unknown size are sorted to the front and counted there. Log-ratios are finite or NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

# keeps the found radius just inside the token it was taken from, as the released code does
_INSIDE = 1e-12


def trust_region_tokens(
    log_ratio: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
) -> Bool[Tensor, "sample token"]:
    """Trained tokens that PPO's minimum could clip: A > 0 and r > 1, or A < 0 and r < 1.

    Tokens with A = 0 are in neither set; a NaN log-ratio is in none.

    Args:
        log_ratio: policy minus sampler, nats.
        advantages: reward units.
        loss_mask: True on the tokens that are trained.

    Source:
        M2PO, arXiv:2510.01161, Algorithm 1, and `_get_trust_region_tokens_delta_sq` of the authors' code.
    """
    log_ratio = log_ratio.detach()
    rising, falling = (advantages > 0) & (log_ratio > 0), (advantages < 0) & (log_ratio < 0)
    return loss_mask & (rising | falling)


def second_moment_mask(
    log_ratio: Float[Tensor, "sample token"],
    eligible: Bool[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    m2_threshold: float,
    *,
    strict: bool,
) -> Bool[Tensor, "sample token"]:
    """Trained tokens that stay when the fewest eligible ones go that bring mean(d^2) down to the threshold.

    The eligible tokens with the largest d^2 go first, of equal ones the last in the batch; the mean is over the
    eligible ones that are left, 0 when none is. d = [0.9, 0.1, -0.8, 0.05], A = [1, 1, -1, 1] and a threshold of 0.04
    drop 0.9 and -0.8: the others have a mean of 0.00625. A token with A = 1 and d = -2 beside them is not in the trust
    region and stays; with all tokens eligible it goes first.

    Args:
        log_ratio: d, policy minus sampler, nats.
        eligible: tokens that may go, `trust_region_tokens` in the paper.
        loss_mask: True on the tokens that are trained.
        m2_threshold: nats^2, the paper's tau.
        strict: AReaL's rule: the mean must be below the threshold, not at it, and one eligible token always stays.

    Returns:
        A constant; False on padding. A NaN log-ratio stays, so that the loss shows it.

    Source:
        M2PO, arXiv:2510.01161, Algorithm 1, sorted: the greedy loop removes exactly a suffix of the sorted d^2. Strict:
        `_get_m2po_loss_mask` of AReaL.
    """
    moments = _ascending(log_ratio, eligible & loss_mask)
    rank = torch.arange(1, len(moments.order) + 1, device=log_ratio.device)
    mean_of_smallest = moments.values.cumsum(0) / rank
    is_low = mean_of_smallest < m2_threshold if strict else mean_of_smallest <= m2_threshold
    candidates = torch.where(is_low & (rank <= moments.num), rank, 0)
    # the longest prefix, not a count: rounding may lift the mean of equal values over the threshold and back
    num_kept = functional.pad(candidates, (1, 0), value=int(strict)).amax()
    is_dropped = torch.zeros_like(loss_mask).flatten()
    is_dropped = is_dropped.scatter(0, moments.order, (rank > num_kept) & (rank <= moments.num))
    return loss_mask & ~is_dropped.view_as(loss_mask)


class AdaptiveRadii(NamedTuple):
    """Clip radii found for a batch, scalars; float64 where the device has it.

    Attributes:
        tau: largest |log-ratio| that is not clipped, nats; inf when nothing is.
        clip_eps_low: 1 - exp(-tau), or its floor; 1 when nothing is clipped.
        clip_eps_high: exp(tau) - 1, or its floor; inf when nothing is clipped.
        m2_before: mean of d^2 over the eligible tokens.
        m2_after: mean of min(d^2, tau^2) over them; floors are not in it.
    """

    tau: Float[Tensor, ""]
    clip_eps_low: Float[Tensor, ""]
    clip_eps_high: Float[Tensor, ""]
    m2_before: Float[Tensor, ""]
    m2_after: Float[Tensor, ""]


def adaptive_radii(
    log_ratio: Float[Tensor, "sample token"],
    eligible: Bool[Tensor, "sample token"],
    m2_budget: float,
    *,
    floor_low: float | None = None,
    floor_high: float | None = None,
) -> AdaptiveRadii:
    """The clip radii at which the authors' code meets the budget on mean(d^2).

    With v the n eligible d^2 ascending and S = m2_budget n: nothing is clipped when mean(v) <= m2_budget; else k is
    the first index, from 0, with v_k (n - k - 1) + v_0 + ... + v_k >= S, and tau^2 = v_{k-1} - 1e-12 (0 for k = 0,
    where the authors' code fails). At k = n - 1 the sum is that of all, above S: such a k is always found. tau lies at
    the breakpoint before the exact water level, so that more is clipped than the budget asks, and clipped in the sense
    of a budget: min(d^2, tau^2) counts, where the paper's Algorithm 1 leaves the large d^2 out.

    Eligible d = [0.9, 0.1, -0.8, 0.05] and a budget of 0.04 have tau = 0.1: radii 0.095 and 0.105.

    Args:
        log_ratio: d, policy minus sampler, nats.
        eligible: the tokens that are counted, `trust_region_tokens` in the authors' code.
        m2_budget: nats^2, `M2_budget` of the code.
        floor_low: smallest lower radius; None: none.
        floor_high: smallest upper radius; None: none.

    Source:
        github.com/Infini-AI-Lab/M2PO, `_solve_tau_from_sorted_delta2`; floors: `miniclip_low`, `miniclip_high`.
    """
    values, _, num = _ascending(log_ratio, eligible)
    index, num_or_one = torch.arange(len(values), device=values.device), num.clamp(min=1)
    sum_if_clipped_here = values * (num - index - 1) + values.cumsum(0)
    # the last one counts as reached, or rounding could leave none
    is_reached = (sum_if_clipped_here >= m2_budget * num) | (index >= num - 1)
    first = (is_reached.cumsum(0) == 0).sum()
    mean = values.sum() / num_or_one
    # a zero in front puts v_{k-1} at k, and 0 at k = 0; take, since indexing with a scalar asks the device for it
    tau_sq = (functional.pad(values, (1, 0)).take(first) - _INSIDE).clamp(min=0.0)
    tau_sq = torch.where(mean > m2_budget, tau_sq, torch.inf)
    after = torch.minimum(values, tau_sq).sum() / num_or_one
    tau = tau_sq.sqrt()
    low, high = -torch.expm1(-tau), torch.expm1(tau)
    low = low if floor_low is None else low.clamp(min=floor_low)
    high = high if floor_high is None else high.clamp(min=floor_high)
    return AdaptiveRadii(tau, low, high, mean, after)


def below_threshold(
    log_ratio: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"], ratio_sq_threshold: float
) -> Bool[Tensor, "sample token"]:
    """Trained tokens whose squared ratio is below the threshold; a constant.

    A NaN ratio is kept: the loss must become NaN for the trainer to see it.

    Args:
        log_ratio: policy minus proximal, nats.
        loss_mask: True on the tokens that are trained.
        ratio_sq_threshold: 4 masks ratios of 2 and more.
    """
    return loss_mask & ~(log_ratio.detach().exp().square() >= ratio_sq_threshold)


def mean_over(values: Float[Tensor, "sample token"], tokens: Bool[Tensor, "sample token"]) -> Float[Tensor, ""]:
    """Mean over some tokens, 0 over none; a constant. Other tokens may hold anything."""
    total = torch.where(tokens, to_wide(values.detach()), 0.0).sum()
    return (total / tokens.sum().clamp(min=1)).to(values.dtype)


class _Ascending(NamedTuple):
    """d^2 of some tokens in ascending order, then a 0 for every other token.

    Attributes:
        values: float64 where the device has it.
        order: their places in the flattened batch.
        num: how many there are.
    """

    values: Float[Tensor, " place"]
    order: Int[Tensor, " place"]
    num: Int[Tensor, ""]


def _ascending(log_ratio: Float[Tensor, "sample token"], tokens: Bool[Tensor, "sample token"]) -> _Ascending:
    moments = to_wide(log_ratio.detach()).square().flatten()
    is_member = tokens.flatten() & ~moments.isnan()
    order = torch.where(is_member, moments, torch.inf).argsort(stable=True)
    return _Ascending(torch.where(is_member, moments, 0.0)[order], order, is_member.sum())


def to_wide(values: Tensor) -> Tensor:
    """In the precision of sums over a batch: float64, where the device has it."""
    return values if values.device.type == "mps" else values.double()
