"""The algorithms called M2PO: what each decides over the whole optimizer batch.

Knows which tokens leave and how tight the clip is; does not know the surrogate of those that stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Bool
from torch import Tensor

from asynctensorrlhf.losses.m2_mask import (
    adaptive_radii,
    below_threshold,
    mean_over,
    second_moment_mask,
    to_wide,
    trust_region_tokens,
)
from asynctensorrlhf.losses.policy_loss import Terms
from asynctensorrlhf.types import BatchPlan

ELIGIBLE: Mapping[str, Callable[[Terms], Tensor]] = {
    "trust_region": lambda terms: trust_region_tokens(terms.log_ratio, terms.advantages, terms.loss_mask),
    "all": lambda terms: terms.loss_mask,
}


@runtime_checkable
class M2Settings(Protocol):
    """The attributes of `M2PO` that its variants read; see there."""

    @property
    def ratio_sq_threshold(self) -> float: ...  # noqa: D102

    @property
    def m2_threshold(self) -> float: ...  # noqa: D102

    @property
    def eligible(self) -> str: ...  # noqa: D102

    @property
    def clip_floor_low(self) -> float | None: ...  # noqa: D102

    @property
    def clip_floor_high(self) -> float | None: ...  # noqa: D102


def _ratio_threshold(loss: M2Settings, terms: Terms) -> BatchPlan:
    keep = below_threshold(terms.log_ratio, terms.loss_mask, loss.ratio_sq_threshold)
    num_kept = keep.sum()
    ratio_sq = terms.log_ratio.exp().square()
    metrics = {
        **_mask_metrics(terms, terms.loss_mask, keep),
        "m2po/m2_ratio_kept": mean_over(ratio_sq, keep),
        # N / kept, by which masking scales up the tokens that stay
        "m2po/kept_weight": terms.loss_mask.sum() / num_kept.clamp(min=1),
    }
    return BatchPlan(keep, num_kept, metrics=metrics)


def _second_moment(loss: M2Settings, terms: Terms) -> BatchPlan:
    eligible = ELIGIBLE[loss.eligible](terms)
    keep = second_moment_mask(
        terms.log_ratio, eligible, terms.loss_mask, loss.m2_threshold, strict=loss.eligible == "all"
    )
    return BatchPlan(keep, keep.sum(), metrics=_mask_metrics(terms, eligible, keep))


def _adaptive_clip(loss: M2Settings, terms: Terms) -> BatchPlan:
    eligible = ELIGIBLE[loss.eligible](terms)
    radii = adaptive_radii(
        terms.log_ratio,
        eligible,
        loss.m2_threshold,
        floor_low=loss.clip_floor_low,
        floor_high=loss.clip_floor_high,
    )
    metrics = {
        "m2po/m2_before": radii.m2_before,
        "m2po/m2_after": radii.m2_after,
        "m2po/m2_all": mean_over(terms.log_ratio.square(), terms.loss_mask),
        "m2po/eligible_fraction": terms.fraction(eligible),
        "m2po/clip_eps_low": radii.clip_eps_low,
        # no clipping is an infinite radius, and no number to plot
        "m2po/clip_eps_high": radii.clip_eps_high.clamp(max=math.exp(20)),
    }
    return BatchPlan(
        terms.loss_mask,
        terms.loss_mask.sum(),
        radii.clip_eps_low.to(terms.log_ratio.dtype),
        radii.clip_eps_high.to(terms.log_ratio.dtype),
        _clipped(loss, terms, radii.tau),
        {name: value.to(terms.log_ratio.dtype) for name, value in metrics.items()},
    )


def _clipped(loss: M2Settings, terms: Terms, tau: Tensor) -> Bool[Tensor, "sample token"]:
    """Trained tokens beyond the radii; told once and in wide numbers, for tau is a token's own log-ratio."""
    delta = to_wide(terms.log_ratio)
    low, high = tau, tau
    if loss.clip_floor_low is not None:
        low = low.clamp(min=-math.log1p(-loss.clip_floor_low))
    if loss.clip_floor_high is not None:
        high = high.clamp(min=math.log1p(loss.clip_floor_high))
    beyond = ((terms.advantages > 0) & (delta > high)) | ((terms.advantages < 0) & (-delta > low))
    return beyond & terms.loss_mask


class Variant(NamedTuple):
    """One of the algorithms called M2PO.

    Attributes:
        decide: over the whole optimizer batch.
        keeps_ppo_clip: unless the config says otherwise.
        denominator: unless the config says otherwise.
        reads: keys of the loss that mean something to it, besides those that all read.
        bounds_sampler: whether its moment is that of policy over sampler, so that nothing else may correct for it.
    """

    decide: Callable[[M2Settings, Terms], BatchPlan]
    keeps_ppo_clip: bool
    denominator: str
    reads: frozenset[str]
    bounds_sampler: bool


VARIANTS: Mapping[str, Variant] = {
    "ratio_threshold": Variant(
        _ratio_threshold,
        True,
        "kept_tokens",
        frozenset({"ratio_sq_threshold", "keep_ppo_clip", "clip_eps_low", "clip_eps_high"}),
        bounds_sampler=False,
    ),
    "second_moment": Variant(
        _second_moment,
        False,
        "all_tokens",
        frozenset({"m2_threshold", "eligible", "keep_ppo_clip", "clip_eps_low", "clip_eps_high"}),
        bounds_sampler=True,
    ),
    "adaptive_clip": Variant(
        _adaptive_clip,
        True,
        "all_tokens",
        frozenset({"m2_threshold", "eligible", "clip_floor_low", "clip_floor_high"}),
        bounds_sampler=True,
    ),
}


def _mask_metrics(
    terms: Terms, eligible: Bool[Tensor, "sample token"], keep: Bool[Tensor, "sample token"]
) -> dict[str, Tensor]:
    """Second moments of the log-ratio before and after, and who was masked; shares are of all trained tokens."""
    moments, masked = terms.log_ratio.square(), terms.loss_mask & ~keep
    metrics = {
        "m2po/m2_before": mean_over(moments, eligible),
        "m2po/m2_after": mean_over(moments, eligible & keep),
        "m2po/m2_all": mean_over(moments, terms.loss_mask),
        "m2po/eligible_fraction": terms.fraction(eligible),
        "m2po/masked_fraction": terms.fraction(masked),
        "m2po/masked_fraction_positive": terms.fraction(masked & (terms.advantages > 0)),
        "m2po/masked_fraction_negative": terms.fraction(masked & (terms.advantages < 0)),
    }
    if terms.entropy is not None:
        metrics["m2po/masked_entropy"] = mean_over(terms.entropy, masked)
    return metrics
