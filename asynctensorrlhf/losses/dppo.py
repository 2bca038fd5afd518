"""DPPO: a trust region in probabilities instead of ratios.

Knows the binary total-variation mask; does not know a divergence over the whole vocabulary.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.policy_loss import PolicyLoss, Surrogate, Terms
from asynctensorrlhf.losses.surrogate import weighted_policy_gradient


def total_variation_mask(
    policy_logprobs: Float[Tensor, "sample token"],
    proximal_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    tv_threshold_low: float,
    tv_threshold_high: float,
) -> Bool[Tensor, "sample token"]:
    """Trained tokens that stay: p - p_prox <= high where A > 0, >= -low elsewhere.

    Probabilities, not ratios: a token that went from 0.001 to 0.01 moved by 0.009 and stays, one from 0.5 to 0.8 goes.

    Args:
        policy_logprobs: log pi_theta, nats; detached here.
        proximal_logprobs: of the proximal policy, nats.
        advantages: reward units.
        loss_mask: True on the tokens that are trained.
        tv_threshold_low: largest fall of a bad token's probability.
        tv_threshold_high: largest rise of a good token's.

    Source:
        arXiv:2602.04879 (binary TV); prime-rl's default loss since 2026.
    """
    moved = policy_logprobs.detach().exp() - proximal_logprobs.exp()
    gone = torch.where(advantages > 0, moved > tv_threshold_high, moved < -tv_threshold_low)
    return loss_mask & ~gone


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyLoss):
    """-sg(min(r, ratio_cap)) A log pi for the tokens that `total_variation_mask` keeps; 0 for the others.

    Attributes:
        tv_threshold_low: largest fall of a bad token's probability, in (0, 1).
        tv_threshold_high: largest rise of a good token's, in (0, 1).
        ratio_cap: largest weight, > 0.
    """

    tv_threshold_low: float
    tv_threshold_high: float
    ratio_cap: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, value in (("low", self.tv_threshold_low), ("high", self.tv_threshold_high)):
            if not 0 < value < 1:
                raise ValueError(f"loss.tv_threshold_{key} must be in (0, 1), got {value}")
        if not self.ratio_cap > 0:
            raise ValueError(f"loss.ratio_cap must be > 0, got {self.ratio_cap}")

    def surrogate(self, terms: Terms) -> Surrogate:
        """The capped ratio as a constant weight inside the region."""
        keep = total_variation_mask(
            terms.policy_logprobs,
            terms.proximal_logprobs,
            terms.advantages,
            terms.loss_mask,
            tv_threshold_low=self.tv_threshold_low,
            tv_threshold_high=self.tv_threshold_high,
        )
        weights = torch.where(keep, terms.log_ratio.detach().exp().clamp(max=self.ratio_cap), 0.0)
        per_token = weighted_policy_gradient(terms.policy_logprobs, terms.advantages, weights)
        masked = terms.fraction(~keep & (terms.advantages != 0))
        return Surrogate(per_token, {"loss/masked_fraction": masked})
