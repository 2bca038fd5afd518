"""Policy gradients with constant weights: REINFORCE, CISPO and TOPR differ only in how they bound the ratio.

Knows -sg(w) A log pi; does not know a trust region that stops the gradient: every trained token keeps one.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.losses.policy_loss import PolicyLoss, Surrogate, Terms
from asynctensorrlhf.losses.surrogate import weighted_policy_gradient


def _surrogate(terms: Terms, weights: Float[Tensor, "sample token"]) -> Surrogate:
    bounded = (weights != terms.log_ratio.detach().exp()) & (terms.advantages != 0)
    per_token = weighted_policy_gradient(terms.policy_logprobs, terms.advantages, weights)
    return Surrogate(per_token, {"loss/bounded_weight_fraction": terms.fraction(bounded)})


@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyLoss):
    """-sg(min(r, ratio_cap)) A log pi, r policy over proximal; no trust region.

    Attributes:
        ratio_cap: largest weight, > 0: truncated importance sampling of stale tokens. None: the weight is 1 whatever
            the ratio, as in REINFORCE on fresh samples; stale ones then bias the gradient.

    Source:
        Williams 1992; with a cap: PipelineRL, arXiv:2509.19128, and the detached coefficient min(pi / mu, rho) of
        LlamaRL's AIPO, arXiv:2505.24034.
    """

    ratio_cap: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_cap is not None and not self.ratio_cap > 0:
            raise ValueError(f"loss.ratio_cap must be > 0 or null, got {self.ratio_cap}")

    def surrogate(self, terms: Terms) -> Surrogate:
        """The weight is 1, or the capped ratio."""
        ratio = terms.log_ratio.detach().exp()
        weights = torch.ones_like(ratio) if self.ratio_cap is None else ratio.clamp(max=self.ratio_cap)
        return _surrogate(terms, weights)


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: the clip bounds a token's weight and never silences it.

    Attributes:
        clip_eps_low: lower clip radius, in (0, 1); None: no lower bound, as MiniMax-M1 trains.
        clip_eps_high: upper clip radius, > 0: the cap is 1 + this. TRL's `epsilon_high` of the same loss is the cap
            itself (5.0 in ScaleRL: 4.0 here).

    Source:
        MiniMax-M1, arXiv:2506.13585, eq. 4.
    """

    clip_eps_low: float | None
    clip_eps_high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_eps_low is not None and not 0 < self.clip_eps_low < 1:
            raise ValueError(f"loss.clip_eps_low must be in (0, 1) or null, got {self.clip_eps_low}")
        if not self.clip_eps_high > 0:
            raise ValueError(f"loss.clip_eps_high must be > 0, got {self.clip_eps_high}")

    def surrogate(self, terms: Terms) -> Surrogate:
        """The weight is the clipped ratio."""
        low = None if self.clip_eps_low is None else 1.0 - self.clip_eps_low
        return _surrogate(terms, terms.log_ratio.detach().exp().clamp(min=low, max=1.0 + self.clip_eps_high))


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyLoss):
    """-A log pi for good tokens, -sg(min(r, 1)) A log pi for bad ones: what is unlikely by now is not pushed further.

    Good means A > 0, per token; the paper says R > 0 and the ratio of the whole trajectory, ROLL and Trinity as here.

    Source:
        Le Roux et al. 2025, arXiv:2503.14286.
    """

    def surrogate(self, terms: Terms) -> Surrogate:
        """The weight is 1, or the ratio up to 1."""
        ratio = terms.log_ratio.detach().exp()
        return _surrogate(terms, torch.where(terms.advantages > 0, 1.0, ratio.clamp(max=1.0)))
