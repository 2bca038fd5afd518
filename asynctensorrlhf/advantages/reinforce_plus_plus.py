"""REINFORCE++: what is still to come after each token, whitened over the batch; no value head.

Knows reward-to-go and its baselines; does not know the loss. No host synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.advantages.gae import gae, kl_in_reward
from asynctensorrlhf.advantages.group_relative import lacks_variance
from asynctensorrlhf.advantages.token_rewards import mean_over, token_rewards
from asynctensorrlhf.advantages.whitening import whiten
from asynctensorrlhf.types import AdvantageInputs, AdvantageOutput

# (rewards, tolerance) -> what is subtracted from them; unscored samples are NaN
BASELINES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda rewards, adv_tol: torch.zeros_like(rewards),
    "group_mean": lambda rewards, adv_tol: torch.where(
        lacks_variance(rewards, adv_tol)[:, None], rewards, rewards.nanmean(dim=1, keepdim=True)
    ),
}


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus:
    """Discounted reward-to-go of each trained token, whitened over all trained tokens of the batch.

    With `group_mean` the score is first measured against its group, and one of a group without variance or with a
    single score is 0; whitening then still moves all of them by the batch's mean. An unscored sample has advantages
    exactly 0 and no part in the statistics. So have all tokens when no reward-to-go differs.

    Attributes:
        adv_baseline: `none`, or `group_mean` (REINFORCE++-baseline).
        gamma: discount per trained token, in [0, 1].
        kl_coef: weight of KL(policy || reference) in the rewards, >= 0; 0 needs no reference.
        adv_tol: see `lacks_variance`, >= 0; of the batch's tokens as of a group's rewards.

    Source:
        Hu et al. 2025, arXiv:2501.03262.
    """

    adv_baseline: str
    gamma: float
    kl_coef: float
    adv_tol: float

    def __post_init__(self) -> None:
        if self.adv_baseline not in BASELINES:
            raise ValueError(f"advantage.adv_baseline must be one of {', '.join(BASELINES)}, got {self.adv_baseline!r}")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"advantage.gamma must be in [0, 1], got {self.gamma}")
        for key, value in (("kl_coef", self.kl_coef), ("adv_tol", self.adv_tol)):
            if not value >= 0:
                raise ValueError(f"advantage.{key} must be >= 0, got {value}")

    @property
    def needs(self) -> frozenset[str]:
        """Two kinds of log-probabilities when there is a KL term."""
        return frozenset({"proximal_logprobs", "ref_logprobs"} if self.kl_coef else set())

    def __call__(self, rewards: Float[Tensor, "group sample"]) -> Float[Tensor, "group sample"]:
        """The scores less the baseline; 0 for unscored samples."""
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        return torch.where(rewards.isnan(), 0.0, rewards - BASELINES[self.adv_baseline](rewards, self.adv_tol))

    def over_batch(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Advantages of the batch."""
        mask = inputs.loss_mask & ~inputs.rewards.isnan()[:, None]
        kl = kl_in_reward(inputs, self.kl_coef)
        rewards = token_rewards(inputs.group_advantages, mask, kl, self.kl_coef * inputs.kl_scale)
        to_go, _ = gae(rewards, torch.zeros_like(rewards), mask, gamma=self.gamma, lam=1.0)
        tokens = torch.where(mask, to_go, torch.nan).flatten()[None]
        is_silent = lacks_variance(tokens, self.adv_tol) & ~torch.where(mask, to_go, 0.0).isnan().any()
        advantages = torch.where(is_silent, 0.0, whiten(to_go, mask))
        metrics = {} if kl is None else {"kl/reward_k1": mean_over(kl, inputs.loss_mask)}
        return AdvantageOutput(advantages, metrics=metrics)
