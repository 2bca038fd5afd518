"""GSPO: the clipped surrogate of a whole sequence's ratio.

Knows that all tokens of a sequence share a ratio and are clipped together; does not know how advantages are made.
"""

from dataclasses import dataclass

from asynctensorrlhf.losses.diagnostics import clip_fractions
from asynctensorrlhf.losses.policy_loss import PolicyLoss, Surrogate, Terms
from asynctensorrlhf.losses.sequence_ratio import SEQUENCE_LOG_RATIOS
from asynctensorrlhf.losses.surrogate import check_trust_region, clipped_surrogate


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """-min(s A, clip(s) A) with the ratio s of the token's sequence (arXiv:2507.18071, eq. 5 and 7).

    With `geometric`, s is exp of the mean log-ratio and its radii are small (3e-4 and 4e-4 in the paper); with
    `product`, exp of the sum, as RLOO clips it. Both carry gradient: a token's share is s A / length, or s A. With the
    mean over sequences the loss is the paper's; log-ratios [0.9, 0.1] of A = 1 cost -e^0.5 and -e^1 unclipped.

    Attributes:
        sequence_ratio: `geometric` or `product`.
        clip_eps_low: lower clip radius of s, in (0, 1).
        clip_eps_high: upper clip radius of s, > 0.
    """

    sequence_ratio: str
    clip_eps_low: float
    clip_eps_high: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_ratio not in SEQUENCE_LOG_RATIOS:
            allowed = ", ".join(SEQUENCE_LOG_RATIOS)
            raise ValueError(f"loss.sequence_ratio must be one of {allowed}, got {self.sequence_ratio!r}")
        check_trust_region(clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high)

    def surrogate(self, terms: Terms) -> Surrogate:
        """The clipped surrogate with every token's ratio replaced by its sequence's."""
        of_sequence = SEQUENCE_LOG_RATIOS[self.sequence_ratio](terms.log_ratio, terms.loss_mask)
        log_ratio = of_sequence[:, None].expand_as(terms.log_ratio)
        region = {"clip_eps_low": self.clip_eps_low, "clip_eps_high": self.clip_eps_high}
        fractions = clip_fractions(log_ratio, terms.advantages, **region, global_num_tokens=terms.global_num_tokens)
        return Surrogate(clipped_surrogate(log_ratio, terms.advantages, **region), fractions)
