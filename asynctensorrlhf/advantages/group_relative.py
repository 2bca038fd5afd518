"""Group-relative advantages: how much better a completion is than the others of its prompt.

Knows the normalisation and its degenerate cases; does not know what happens to the advantages. No host synchronisation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asynctensorrlhf.types import AdvantageInputs, AdvantageOutput

# scored samples -> what a deviation from the mean of all of them is multiplied by
BASELINES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.ones_like,
    "leave_one_out": lambda num_scored: num_scored / (num_scored - 1),
}

# (sum of squared deviations, scored samples, eps) -> what the deviations are divided by
DIVISORS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "population": lambda squares, num_scored, eps: (squares / num_scored).sqrt() + eps,
    "sample": lambda squares, num_scored, eps: (squares / (num_scored - 1)).sqrt() + eps,
    "none": lambda squares, num_scored, eps: torch.ones_like(squares),
}


STD_LEVELS = ("group", "batch")


@dataclass(frozen=True, kw_only=True)
class GroupRelative:
    """(reward - baseline) / (std + eps) over the scored samples of a group.

    Rewards [1, 0] give +-1 with `population` (the n-divisor) and +-0.707 with `sample` (n - 1). An unscored (NaN)
    sample has advantage exactly 0 and counts in neither mean nor std; so have all samples of a group of one, of a
    group with one score, and of a group without variance (see `lacks_variance`).

    Attributes:
        adv_baseline: `mean` of the group, or `leave_one_out`, the mean of the others: n / (n - 1) times as far away.
        adv_std: which standard deviation divides: `population`, `sample` or `none` (as Dr.GRPO and RLOO).
        adv_std_level: whose rewards it is of: the `group`, around its mean, or the step's whole `batch`, around theirs.
        adv_eps: added to it, >= 0; not read with `none`.
        adv_tol: see `lacks_variance`, >= 0.

    Source:
        Shao et al. 2024, arXiv:2402.03300; without std: arXiv:2503.20783; leave one out: arXiv:2402.14740;
        std of the batch: arXiv:2508.08221.
    """

    adv_baseline: str
    adv_std: str
    adv_std_level: str
    adv_eps: float
    adv_tol: float

    needs = frozenset[str]()

    def __post_init__(self) -> None:
        choices = (
            ("adv_baseline", self.adv_baseline, tuple(BASELINES)),
            ("adv_std", self.adv_std, tuple(DIVISORS)),
            ("adv_std_level", self.adv_std_level, STD_LEVELS),
        )
        for key, value, allowed in choices:
            if value not in allowed:
                raise ValueError(f"advantage.{key} must be one of {', '.join(allowed)}, got {value!r}")
        for key, bound in (("adv_eps", self.adv_eps), ("adv_tol", self.adv_tol)):
            if not bound >= 0:
                raise ValueError(f"advantage.{key} must be >= 0, got {bound}")
        if self.adv_std == "none" and self.adv_std_level == "batch":
            raise ValueError(
                "advantage.adv_std_level=batch says whose standard deviation divides, and with advantage.adv_std=none "
                "none does: set advantage.adv_std=population or leave adv_std_level at group"
            )

    def __call__(self, rewards: Float[Tensor, "group sample"]) -> Float[Tensor, "group sample"]:
        """One advantage per sample, before a std of the batch; float32, or float64 for float64 rewards."""
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        scored = ~rewards.isnan()
        num_scored = scored.sum(dim=1, keepdim=True).to(rewards.dtype)
        mean = rewards.nansum(dim=1, keepdim=True) / num_scored
        deviation = rewards - mean
        squares = torch.where(scored, deviation, 0.0).square().sum(dim=1, keepdim=True)
        divisor = DIVISORS["none" if self.adv_std_level == "batch" else self.adv_std]
        advantages = BASELINES[self.adv_baseline](num_scored) * deviation / divisor(squares, num_scored, self.adv_eps)
        is_silent = ~scored | lacks_variance(rewards, self.adv_tol)[:, None]
        return torch.where(is_silent, 0.0, advantages)

    def over_batch(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """The groups' advantages, divided by the std of all scored rewards of the batch when that is asked for."""
        if self.adv_std_level == "group":
            return AdvantageOutput(inputs.group_advantages)
        scored = ~inputs.rewards.isnan()
        num_scored = scored.sum()
        deviation = torch.where(scored, inputs.rewards - inputs.rewards.nansum() / num_scored, 0.0)
        divisor = DIVISORS[self.adv_std](deviation.square().sum(), num_scored, self.adv_eps)
        advantages = inputs.group_advantages / divisor
        # silent groups first: in a batch of equal rewards the divisor may be 0
        return AdvantageOutput(torch.where(inputs.group_advantages == 0, 0.0, advantages))


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
    adv_baseline: str = "mean",
    adv_std: str = "population",
    adv_eps: float = 1e-8,
    adv_tol: float = 1e-6,
) -> Float[Tensor, " sample"]:
    """`GroupRelative` of samples in any order and of groups of any sizes.

    Args:
        rewards: NaN = no score.
        group_ids: samples with equal ids form a group.
        adv_baseline: see `GroupRelative`, as the rest.
        adv_std: of the group.
        adv_eps: added to it.
        adv_tol: of groups without variance.

    Returns:
        One advantage per sample. Memory is square in the number of samples.
    """
    # Row i holds the group of sample i, the others being unscored: shapes don't depend on values, so nothing syncs.
    own_group = torch.where(group_ids[:, None] == group_ids, rewards, torch.nan)
    advantage = GroupRelative(
        adv_baseline=adv_baseline, adv_std=adv_std, adv_std_level="group", adv_eps=adv_eps, adv_tol=adv_tol
    )
    return advantage(own_group).diagonal()
