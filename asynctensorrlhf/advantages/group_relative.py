"""Group-relative advantages: how much better a completion is than the others of its prompt.

Knows the normalisation and its degenerate cases; does not know what happens to the advantages. No host synchronisation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# (sum of squared deviations, scored samples, eps) -> what the deviations are divided by
DIVISORS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "population": lambda squares, num_scored, eps: (squares / num_scored).sqrt() + eps,
    "sample": lambda squares, num_scored, eps: (squares / (num_scored - 1)).sqrt() + eps,
    "none": lambda squares, num_scored, eps: torch.ones_like(squares),
}


@dataclass(frozen=True, kw_only=True)
class GroupRelative:
    """(reward - mean) / (std + eps) within a group, over its scored samples.

    Rewards [1, 0] give +-1 with `population` (the n-divisor) and +-0.707 with `sample` (n - 1). An unscored (NaN)
    sample has advantage exactly 0 and counts in neither mean nor std; so have all samples of a group of one, of a
    group with one score, and of a group without variance (see `lacks_variance`).

    Attributes:
        adv_std: which standard deviation divides: `population`, `sample` or `none` (reward - mean, as Dr.GRPO).
        adv_eps: added to it, >= 0; not read with `none`.
        adv_tol: see `lacks_variance`, >= 0.

    Source:
        Shao et al. 2024, arXiv:2402.03300; without std: arXiv:2503.20783.
    """

    adv_std: str
    adv_eps: float
    adv_tol: float

    def __post_init__(self) -> None:
        if self.adv_std not in DIVISORS:
            raise ValueError(f"advantage.adv_std must be one of {', '.join(DIVISORS)}, got {self.adv_std!r}")
        for key, value in (("adv_eps", self.adv_eps), ("adv_tol", self.adv_tol)):
            if not value >= 0:
                raise ValueError(f"advantage.{key} must be >= 0, got {value}")

    def __call__(self, rewards: Float[Tensor, "group sample"]) -> Float[Tensor, "group sample"]:
        """One advantage per sample; float32, or float64 for float64 rewards."""
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        scored = ~rewards.isnan()
        num_scored = scored.sum(dim=1, keepdim=True)
        mean = rewards.nansum(dim=1, keepdim=True) / num_scored
        deviation = rewards - mean
        squares = torch.where(scored, deviation, 0.0).square().sum(dim=1, keepdim=True)
        advantages = deviation / DIVISORS[self.adv_std](squares, num_scored, self.adv_eps)
        is_silent = ~scored | lacks_variance(rewards, self.adv_tol)[:, None]
        return torch.where(is_silent, 0.0, advantages)


def lacks_variance(rewards: Float[Tensor, "group sample"], adv_tol: float) -> Bool[Tensor, " group"]:
    """Groups whose scores span at most `adv_tol` x max(1, max |reward|), those with fewer than two scores included.

    The span decides and not the std: eight float32 rewards of 0.7 have a std of 6e-8, which an eps of 1e-8 would
    turn into advantages of 0.86. An infinite score never counts as silent: its advantages are NaN and the step shows.
    """
    scored = ~rewards.isnan()
    highest = torch.where(scored, rewards, -torch.inf).amax(dim=1)
    lowest = torch.where(scored, rewards, torch.inf).amin(dim=1)
    magnitude = torch.where(scored, rewards.abs(), 0.0).amax(dim=1)
    return (highest - lowest <= adv_tol * magnitude.clamp(min=1.0)) & magnitude.isfinite()


def group_advantages(
    rewards: Float[Tensor, " sample"],
    group_ids: Int[Tensor, " sample"],
    *,
    adv_std: str = "population",
    adv_eps: float = 1e-8,
    adv_tol: float = 1e-6,
) -> Float[Tensor, " sample"]:
    """`GroupRelative` of samples in any order and of groups of any sizes.

    Args:
        rewards: NaN = no score.
        group_ids: samples with equal ids form a group.
        adv_std: see `GroupRelative`, as the rest.
        adv_eps: see `GroupRelative`.
        adv_tol: see `GroupRelative`.

    Returns:
        One advantage per sample. Memory is square in the number of samples.
    """
    # Row i holds the group of sample i, the others being unscored: shapes don't depend on values, so nothing syncs.
    own_group = torch.where(group_ids[:, None] == group_ids, rewards, torch.nan)
    return GroupRelative(adv_std=adv_std, adv_eps=adv_eps, adv_tol=adv_tol)(own_group).diagonal()
