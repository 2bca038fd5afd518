"""GRPO of plain tensors: the clipped surrogate of group-relative advantages, averaged over each sequence first.

Knows which mean GRPO takes; does not know how a group's advantages are computed: they arrive as a callable. In a run,
`loss=grpo` is `PPO` with this mean.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.interfaces import GroupAdvantage
from asynctensorrlhf.losses.ppo import compute_ppo_loss
from asynctensorrlhf.types import LossOutput


def compute_grpo_loss(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    rewards: Float[Tensor, "group member"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    group_advantage: GroupAdvantage,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    aggregation: str = "seq_mean_token_mean",
    sequences: str = "trained",
    loss_scale: int | float | None = None,
) -> LossOutput:
    """GRPO's loss (arXiv:2402.03300, eq. 3, without its KL term) from the rewards of complete groups.

    On equal lengths it is PPO; on unequal ones every sequence weighs the same, so a token of a long one weighs less.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats; carries the gradient. Samples of a group are
            neighbours: sample i belongs to group i // group size.
        behaviour_logprobs: log pi of the sampler, nats.
        rewards: one per sample, a row per group; NaN = no score.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        group_advantage: rewards of groups to their advantages, for instance `GroupRelative`.
        clip_eps_low: see `PPO`, as the rest.
        clip_eps_high: see `PPO`.
        aggregation: see `PPO`.
        sequences: see `PPO`.
        loss_scale: see `PPO`.

    Raises:
        ValueError: the rewards are not one per sample.
    """
    if rewards.numel() != loss_mask.shape[0]:
        raise ValueError(f"rewards must hold one per sample ({loss_mask.shape[0]}), got shape {tuple(rewards.shape)}")
    return compute_ppo_loss(
        policy_logprobs,
        behaviour_logprobs,
        group_advantage(rewards).flatten(),
        loss_mask,
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        aggregation=aggregation,
        sequences=sequences,
        loss_scale=loss_scale,
    )
