"""M2PO, the ratio-threshold variant: PPO without the tokens whose squared ratio is too large.

Knows which tokens leave the loss and what divides the rest; does not know the paper's second-moment mask
(arXiv:2510.01161, Algorithm 1), which bounds mean(log r)^2 and drops the clip: results of one are not the other's.
"""

import math
import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.aggregation import at_least_one
from asynctensorrlhf.losses.clipped import whole_batch
from asynctensorrlhf.losses.diagnostics import clip_fractions, ratio_maxima, ratio_moments
from asynctensorrlhf.losses.surrogate import check_trust_region, clipped_surrogate, log_ratio, masked_advantages
from asynctensorrlhf.types import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class M2PO:
    """Loss sum(m max(-A r, -A clip(r))) / max(1, sum m) with the constant mask m = 1[r^2 < ratio_sq_threshold].

    With sqrt(threshold) above 1 + clip_eps_high, the gradient changes only for A < 0 and r >= sqrt(threshold) (good
    tokens up there are clipped anyway), and the kept tokens weigh more, by N / sum m. Tokens of small ratio stay.
    Ratios 2.5, 1, 1 of bad tokens (A = -1), threshold 4: the loss is (1 + 1) / 2 = 1, where PPO's is 4.5 / 3 = 1.5.

    Attributes:
        ratio_sq_threshold: squared importance ratio from which a token is masked, > 1.
        clip_eps_low: lower clip radius of the importance ratio, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
    """

    ratio_sq_threshold: float
    clip_eps_low: float
    clip_eps_high: float

    needs = frozenset({"keep_mask"})
    sequences = "trained"

    def __post_init__(self) -> None:
        check_trust_region(clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high)
        if not self.ratio_sq_threshold > 1:
            raise ValueError(f"loss.ratio_sq_threshold must be > 1, got {self.ratio_sq_threshold}")
        if math.sqrt(self.ratio_sq_threshold) <= 1 + self.clip_eps_high:
            warnings.warn(
                f"loss.ratio_sq_threshold={self.ratio_sq_threshold} masks every ratio that loss.clip_eps_high="
                f"{self.clip_eps_high} would clip; above {(1 + self.clip_eps_high) ** 2:.4g} it would not",
                stacklevel=3,
            )

    def keep_mask(
        self,
        log_ratio: Float[Tensor, "sample token"],
        advantages: Float[Tensor, "sample token"],
        loss_mask: Bool[Tensor, "sample token"],
    ) -> Bool[Tensor, "sample token"]:
        """Trained tokens with r^2 below the threshold; advantages don't matter."""
        return below_threshold(log_ratio, loss_mask, self.ratio_sq_threshold)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the loss."""
        return _ratio_threshold_loss(
            inputs,
            ratio_sq_threshold=self.ratio_sq_threshold,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
        )


def below_threshold(
    log_ratio: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"], ratio_sq_threshold: float
) -> Bool[Tensor, "sample token"]:
    """Trained tokens whose squared ratio is below the threshold; a constant.

    A NaN ratio is kept: the loss must become NaN for the trainer to see it.
    """
    return loss_mask & ~(log_ratio.detach().exp().square() >= ratio_sq_threshold)


def compute_m2po_loss(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"] | Float[Tensor, " sample"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    ratio_sq_threshold: float = 4.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
) -> LossOutput:
    """`M2PO` of plain tensors that are the whole batch.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats; carries the gradient.
        behaviour_logprobs: log pi of the sampler, nats.
        advantages: reward units; one per token, or one per sample for all its tokens.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        ratio_sq_threshold: squared ratio from which a token is masked; here any number, 0 masks all.
        clip_eps_low: lower clip radius, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
    """
    check_trust_region(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    inputs = whole_batch(policy_logprobs, behaviour_logprobs, advantages, loss_mask, sequences=M2PO.sequences)
    return _ratio_threshold_loss(
        inputs, ratio_sq_threshold=ratio_sq_threshold, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high
    )


def _ratio_threshold_loss(
    inputs: LossInputs, *, ratio_sq_threshold: float, clip_eps_low: float, clip_eps_high: float
) -> LossOutput:
    delta = log_ratio(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.loss_mask)
    advantages = masked_advantages(inputs.advantages, inputs.loss_mask, delta.dtype)
    keep, num_kept = _kept(inputs, delta, ratio_sq_threshold)
    per_token = clipped_surrogate(delta, advantages, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    num_tokens = inputs.global_num_tokens
    metrics = {
        **clip_fractions(
            delta, advantages, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, global_num_tokens=num_tokens
        ),
        **ratio_moments(delta, inputs.loss_mask, global_num_tokens=num_tokens),
        "m2po/masked_fraction": (inputs.loss_mask & ~keep).to(delta.dtype).sum() / at_least_one(num_tokens),
        "m2po/m2_ratio_kept": torch.where(keep, delta.detach().exp().square(), 0.0).sum() / num_kept,
        # N / kept, by which masking scales up the tokens that stay.
        "m2po/kept_weight": inputs.loss_mask.to(delta.dtype).sum() / num_kept,
    }
    return LossOutput(torch.where(keep, per_token, 0.0).sum() / num_kept, metrics, ratio_maxima(delta))


def _kept(
    inputs: LossInputs, delta: Float[Tensor, "sample token"], ratio_sq_threshold: float
) -> tuple[Bool[Tensor, "sample token"], Tensor | float]:
    if inputs.keep_mask is None:
        keep = below_threshold(delta, inputs.loss_mask, ratio_sq_threshold)
    else:
        keep = inputs.keep_mask & inputs.loss_mask
    num_kept = keep.sum() if inputs.global_num_kept_tokens is None else inputs.global_num_kept_tokens
    return keep, at_least_one(num_kept)
