"""Generalised advantage estimation: token rewards and a value head's estimates become advantages and returns.

Knows the recursion over trained tokens; does not know the head. No host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.advantages.critic import Critic
from asynctensorrlhf.advantages.token_rewards import mean_over, reference_kl, token_rewards
from asynctensorrlhf.advantages.whitening import whiten
from asynctensorrlhf.types import AdvantageInputs, AdvantageOutput


def gae(
    rewards: Float[Tensor, "sample token"],
    values: Float[Tensor, "sample token"],
    mask: Bool[Tensor, "sample token"],
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Float[Tensor, " sample"] | None = None,
) -> tuple[Float[Tensor, "sample token"], Float[Tensor, "sample token"]]:
    """Advantages and returns, backward over trained tokens only: a token that isn't trained is as if it weren't there.

        delta = reward + gamma V_next - V;  advantage = delta + gamma lam advantage_next;  return = advantage + V

    Args:
        rewards: of each token; positions outside the mask may hold anything, NaN included.
        values: V of the state before each token, reward units; likewise.
        mask: True on the tokens that are trained.
        gamma: discount per trained token, in [0, 1].
        lam: 1 weighs whole returns, 0 one step, in [0, 1].
        bootstrap_values: V after the last trained token; None: 0, the sample has ended.

    Returns:
        Both 0 outside the mask. Advantages aren't whitened, for returns must not be.

    Source:
        Schulman et al. 2015, arXiv:1506.02438.
    """
    rewards, values = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap_values is None else bootstrap_values
    advantage = torch.zeros_like(next_value)
    backwards = []
    for reward, value, is_trained in zip(rewards.T.flip(0), values.T.flip(0), mask.T.flip(0), strict=True):
        delta = reward + gamma * next_value - value
        advantage = torch.where(is_trained, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(is_trained, value, next_value)
        backwards.append(advantage)
    advantages = torch.where(mask, torch.stack(backwards, dim=1).flip(1), 0.0)
    return advantages, advantages + values


@dataclass(frozen=True, kw_only=True)
class GAE:
    """Advantages of tokens by a value head.

    An unscored sample has advantages exactly 0, returns equal to its values, and no part in whitening.

    Attributes:
        gamma: discount per trained token, in [0, 1].
        lam: in [0, 1].
        kl_coef: weight of KL(policy || reference) in the rewards, >= 0; 0 needs no reference.
        whiten: whether advantages get mean 0 and variance 1 over the batch's trained tokens.
        bootstrap_truncated: whether a sample that the length limit cut is worth the value of the state it was cut in;
            false: it ended there.
        critic: how the value head is trained.

    Source:
        Schulman et al. 2015, arXiv:1506.02438; KL in the reward: arXiv:2203.02155.
    """

    gamma: float
    lam: float
    kl_coef: float
    whiten: bool
    bootstrap_truncated: bool
    critic: Critic

    def __post_init__(self) -> None:
        for key, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"advantage.{key} must be in [0, 1], got {value}")
        if not self.kl_coef >= 0:
            raise ValueError(f"advantage.kl_coef must be >= 0, got {self.kl_coef}")

    @property
    def needs(self) -> frozenset[str]:
        """The values, and two kinds of log-probabilities when there is a KL term."""
        return frozenset({"values"} | ({"proximal_logprobs", "ref_logprobs"} if self.kl_coef else set()))

    def __call__(self, rewards: Float[Tensor, "group sample"]) -> Float[Tensor, "group sample"]:
        """The scores themselves; 0 for unscored samples."""
        return torch.where(rewards.isnan(), 0.0, rewards)

    def over_batch(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Advantages and returns of the batch."""
        assert inputs.values is not None, "needs holds values"
        values, mask = inputs.values[:, :-1], inputs.loss_mask
        scored = mask & ~inputs.rewards.isnan()[:, None]
        kl = kl_in_reward(inputs, self.kl_coef)
        rewards = token_rewards(inputs.group_advantages, mask, kl, self.kl_coef * inputs.kl_scale)
        after_last = self._after_last(inputs) if self.bootstrap_truncated else None
        advantages, returns = gae(rewards, values, scored, gamma=self.gamma, lam=self.lam, bootstrap_values=after_last)
        returns = torch.where(scored, returns, torch.where(mask, values, 0.0))
        metrics = {
            "value/return_mean": mean_over(returns, scored),
            "value/explained_variance": _explained_variance(values, returns, scored),
        }
        if kl is not None:
            metrics["kl/reward_k1"] = mean_over(kl, mask)
        return AdvantageOutput(whiten(advantages, scored) if self.whiten else advantages, returns, metrics)

    def _after_last(self, inputs: AdvantageInputs) -> Float[Tensor, " sample"]:
        assert inputs.values is not None, "needs holds values"
        positions = torch.arange(1, inputs.loss_mask.shape[1] + 1, device=inputs.loss_mask.device)
        after_last = torch.where(inputs.loss_mask, positions, 0).amax(dim=1)
        values = inputs.values.gather(1, after_last[:, None])[:, 0]
        return torch.where(inputs.is_truncated & (after_last > 0), values, 0.0)


def kl_in_reward(inputs: AdvantageInputs, kl_coef: float) -> Float[Tensor, "sample token"] | None:
    """`reference_kl` of the batch, None when it has no weight."""
    if not kl_coef:
        return None
    assert inputs.proximal_logprobs is not None, "needs holds both"
    assert inputs.ref_logprobs is not None, "needs holds both"
    return reference_kl(inputs.proximal_logprobs, inputs.ref_logprobs, inputs.loss_mask)


def _explained_variance(
    values: Float[Tensor, "sample token"], returns: Float[Tensor, "sample token"], mask: Bool[Tensor, "sample token"]
) -> Float[Tensor, ""]:
    """1 - Var(return - V) / Var(return): 1 is a perfect critic; 0 where returns don't vary."""
    of_error, of_returns = (mean_over((x - mean_over(x, mask)).square(), mask) for x in (returns - values, returns))
    return torch.where(of_returns > 0, 1 - of_error / of_returns, 0.0)
