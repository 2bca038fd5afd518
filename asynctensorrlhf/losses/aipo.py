"""The one-sided ratio surrogate that asynchronous trainers took from AIPO.

Knows -min(r, cap) A differentiated through the minimum; does not know a lower bound.
"""

from dataclasses import dataclass

from asynctensorrlhf.losses.policy_loss import PolicyLoss, Surrogate, Terms


@dataclass(frozen=True, kw_only=True)
class AIPO(PolicyLoss):
    """-min(r, ratio_cap) A: no gradient above the cap, whatever the sign of A, and the full one below.

    LlamaRL (arXiv:2505.24034) has the cap in a detached coefficient, which is `Reinforce` with `ratio_cap`: its tokens
    above the cap keep a gradient. Ratio 2 with cap 1.3 and A = 1 costs -1.3 here and has none.

    Attributes:
        ratio_cap: largest ratio that is trained, > 0.

    Source:
        prime-rl 2025 (cap 8).
    """

    ratio_cap: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ratio_cap > 0:
            raise ValueError(f"loss.ratio_cap must be > 0, got {self.ratio_cap}")

    def surrogate(self, terms: Terms) -> Surrogate:
        """The capped ratio times the advantage."""
        ratio = terms.log_ratio.exp()
        is_capped = (ratio.detach() > self.ratio_cap) & (terms.advantages != 0)
        per_token = -ratio.clamp(max=self.ratio_cap) * terms.advantages
        return Surrogate(per_token, {"loss/clip_fraction": terms.fraction(is_capped)})
