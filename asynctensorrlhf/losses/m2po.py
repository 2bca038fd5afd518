"""M2PO in the three forms that people call by this name; results of one are never those of another.

Knows whether the clip stays and what divides the rest; does not know which tokens leave, nor stages before it.

    variant          mask                                   clip             divided by    source
    ratio_threshold  r^2 >= ratio_sq_threshold              PPO's            kept tokens   this project's design
    second_moment    largest (log r)^2 until mean <= tau    none             all tokens    arXiv:2510.01161, Alg. 1
    adaptive_clip    none                                   radii of tau     all tokens    the authors' released code

`second_moment` with `eligible: all` and `denominator: kept_tokens` masks as AReaL does.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.aggregation import at_least_one
from asynctensorrlhf.losses.diagnostics import clip_fractions
from asynctensorrlhf.losses.m2_variants import ELIGIBLE, VARIANTS
from asynctensorrlhf.losses.policy_loss import PLAIN, PolicyLoss, Surrogate, Terms, whole_batch
from asynctensorrlhf.losses.surrogate import check_trust_region, clipped_surrogate
from asynctensorrlhf.types import BatchPlan, LossOutput

DENOMINATORS = ("all_tokens", "kept_tokens")


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyLoss):
    """The clipped or unclipped surrogate of the tokens that a mask over the whole optimizer batch leaves.

    `ratio_threshold`: sum(m max(-A r, -A clip(r))) / max(1, sum m), m = 1[r^2 < ratio_sq_threshold]. With
    sqrt(threshold) above 1 + clip_eps_high, the gradient changes only for A < 0 and r >= sqrt(threshold) (good tokens
    up there are clipped anyway), and the kept tokens weigh more, by N / sum m. Ratios 2.5, 1, 1 of bad tokens with
    threshold 4: the loss is (1 + 1) / 2 = 1, where PPO's is 4.5 / 3 = 1.5.

    `second_moment`: -sum(m r A) / N, m from `second_moment_mask`; no ratio is clipped. A token with A > 0 and
    log r = -2 is never masked with `eligible: trust_region` and is the first to go with `all`.

    `adaptive_clip`: PPO's loss with the radii of `adaptive_radii`; no token is masked.

    The mask is a constant: no gradient flows through it. Dropped tokens cost nothing.

    Attributes:
        variant: a key of `VARIANTS`.
        ratio_sq_threshold: squared importance ratio from which a token is masked, >= 0; up to 1 it masks the sampler's
            own tokens, which config refuses; read by `ratio_threshold`.
        m2_threshold: bound on the mean of (log r)^2, nats^2, > 0; read by `second_moment` and `adaptive_clip`.
        eligible: tokens that may be masked and that the mean is over: `trust_region` (the paper) or `all` (AReaL, which
            asks for a mean below the threshold and keeps at least one); read by the same two.
        keep_ppo_clip: whether the surrogate is clipped at the radii below; None: as the variant's source does.
        denominator: `all_tokens` or `kept_tokens`; None: as the variant's source does.
        clip_eps_low: lower clip radius of the importance ratio, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
        clip_floor_low: smallest radius that `adaptive_clip` may find, in (0, 1); None: none.
        clip_floor_high: smallest upper one, > 0; None: none.
    """

    variant: str
    ratio_sq_threshold: float
    m2_threshold: float
    eligible: str
    keep_ppo_clip: bool | None
    denominator: str | None
    clip_eps_low: float
    clip_eps_high: float
    clip_floor_low: float | None
    clip_floor_high: float | None

    own_needs = frozenset({"plan"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value, allowed in (
            ("variant", self.variant, VARIANTS),
            ("eligible", self.eligible, ELIGIBLE),
            ("denominator", self._denominator if self.variant in VARIANTS else "", (*DENOMINATORS, "")),
        ):
            if value not in allowed:
                raise ValueError(f"loss.{key} must be one of {', '.join(filter(None, allowed))}, got {value!r}")
        check_trust_region(clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high)
        self._check_thresholds()
        self._check_stages()

    def _check_thresholds(self) -> None:
        if not self.ratio_sq_threshold >= 0:
            raise ValueError(f"loss.ratio_sq_threshold must be >= 0, got {self.ratio_sq_threshold}")
        if not self.m2_threshold > 0:
            raise ValueError(f"loss.m2_threshold must be > 0, got {self.m2_threshold}")
        low, high = self.clip_floor_low, self.clip_floor_high
        if low is not None and not 0 < low < 1:
            raise ValueError(f"loss.clip_floor_low must be in (0, 1) or null, got {low}")
        if high is not None and not high > 0:
            raise ValueError(f"loss.clip_floor_high must be > 0 or null, got {high}")

    def _check_stages(self) -> None:
        own = VARIANTS[self.variant]
        if own.bounds_sampler and self.correction.is_active:
            raise ValueError(
                f"loss.correction corrects twice with loss.variant={self.variant}: its ratio is policy over sampler "
                "already; use loss/correction=none"
            )
        if own.bounds_sampler and self.proximal != "rollout":
            raise ValueError(
                f"loss.proximal={self.proximal} makes no sense with loss.variant={self.variant}, which bounds policy "
                "over sampler: at the first update of a step the ratio would be 1 and nothing bounded; use rollout"
            )
        if self.keep_ppo_clip is False and "keep_ppo_clip" not in own.reads:
            raise ValueError(
                f"loss.keep_ppo_clip must not be false with loss.variant={self.variant}: clipping is all it does"
            )
        if self._denominator == "kept_tokens" and self.aggregation != "token_mean":
            raise ValueError(
                f"loss.denominator=kept_tokens needs loss.aggregation=token_mean, got {self.aggregation}; "
                "other means don't divide by tokens: use loss.denominator=all_tokens"
            )
        self._warn_of_dead_clip()

    def _warn_of_dead_clip(self) -> None:
        is_dead = math.sqrt(self.ratio_sq_threshold) <= 1 + self.clip_eps_high
        if is_dead and self._is_clipped and "ratio_sq_threshold" in VARIANTS[self.variant].reads:
            warnings.warn(
                f"loss.ratio_sq_threshold={self.ratio_sq_threshold} masks every ratio that loss.clip_eps_high="
                f"{self.clip_eps_high} would clip; above {(1 + self.clip_eps_high) ** 2:.4g} it would not",
                stacklevel=5,
            )

    @property
    def _is_clipped(self) -> bool:
        return VARIANTS[self.variant].keeps_ppo_clip if self.keep_ppo_clip is None else self.keep_ppo_clip

    @property
    def _denominator(self) -> str:
        return VARIANTS[self.variant].denominator if self.denominator is None else self.denominator

    def decide(self, terms: Terms) -> BatchPlan:
        """The variant's mask or radii."""
        return VARIANTS[self.variant].decide(self, terms)

    def surrogate(self, terms: Terms) -> Surrogate:
        """The surrogate of the tokens that stay."""
        plan = terms.plan
        assert plan is not None, "the frame makes a plan for a loss that needs one"
        if plan.clip_mask is not None:
            per_token, metrics = _clipped_as_planned(terms, plan)
        elif self._is_clipped:
            radii = {"clip_eps_low": self.clip_eps_low, "clip_eps_high": self.clip_eps_high}
            per_token = clipped_surrogate(terms.log_ratio, terms.advantages, **radii)
            metrics = clip_fractions(
                terms.log_ratio, terms.advantages, **radii, global_num_tokens=terms.global_num_tokens
            )
        else:
            per_token, metrics = -terms.log_ratio.exp() * terms.advantages, {}
        num_tokens = at_least_one(plan.num_kept) if self._denominator == "kept_tokens" else None
        # a masked token costs nothing, but an advantage that is no number must still show
        return Surrogate(torch.where(plan.keep_mask, per_token, 0.0 * terms.advantages), metrics, num_tokens)


def _clipped_as_planned(terms: Terms, plan: BatchPlan) -> tuple[Float[Tensor, "sample token"], dict[str, Tensor]]:
    """PPO's clipped surrogate where the plan says which tokens its radii clip."""
    assert plan.clip_mask is not None, "the plan says it"
    good, bad = plan.clip_mask & (terms.advantages > 0), plan.clip_mask & (terms.advantages < 0)
    ratio = terms.log_ratio.exp()
    ratio = torch.where(good, 1.0 + plan.clip_eps_high, torch.where(bad, 1.0 - plan.clip_eps_low, ratio))
    fractions = {"loss/clip_fraction": good | bad, "loss/clip_fraction_low": bad, "loss/clip_fraction_high": good}
    return -ratio * terms.advantages, {name: terms.fraction(tokens) for name, tokens in fractions.items()}


def compute_m2po_loss(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"] | Float[Tensor, " sample"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    ratio_sq_threshold: float = 4.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    **options: Any,
) -> LossOutput:
    """`M2PO` of plain tensors that are the whole batch, the ratio-threshold variant unless `options` names another.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats; carries the gradient.
        behaviour_logprobs: log pi of the sampler, nats.
        advantages: reward units; one per token, or one per sample for all its tokens.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        ratio_sq_threshold: squared ratio from which a token is masked; here any number, 0 masks all.
        clip_eps_low: lower clip radius, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
        options: further attributes of `M2PO`, such as `variant="second_moment"`, `m2_threshold`, `eligible`.
    """
    loss = M2PO(
        **{
            **PLAIN,
            **DEFAULTS,
            "ratio_sq_threshold": ratio_sq_threshold,
            "clip_eps_low": clip_eps_low,
            "clip_eps_high": clip_eps_high,
            **options,
        }
    )
    return loss(whole_batch(policy_logprobs, behaviour_logprobs, advantages, loss_mask, sequences=loss.sequences))


DEFAULTS: Mapping[str, Any] = {
    "aggregation": "token_mean",
    "sequences": "trained",
    "loss_scale": None,
    "variant": "ratio_threshold",
    "m2_threshold": 0.04,
    "eligible": "trust_region",
    "keep_ppo_clip": None,
    "denominator": None,
    "clip_floor_low": None,
    "clip_floor_high": None,
}
"""What `compute_m2po_loss` takes where it is told nothing, as conf/loss/m2po.yaml."""
