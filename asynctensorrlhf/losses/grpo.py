"""GRPO: the clipped surrogate of group-relative advantages, averaged over each sequence, then over sequences.

Knows GRPO's settings; does not know how a group's advantages are computed: they arrive as numbers or as a callable.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.interfaces import GroupAdvantage
from asynctensorrlhf.losses.aggregation import check_aggregation
from asynctensorrlhf.losses.clipped import clipped_policy_loss, whole_batch
from asynctensorrlhf.losses.surrogate import check_trust_region
from asynctensorrlhf.types import LossInputs, LossOutput


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """Clipped surrogate with the mean of the GRPO paper (arXiv:2402.03300, eq. 3, without its KL term).

    On equal lengths it is PPO; on unequal ones every sequence weighs the same, so a token of a long one weighs less.

    Attributes:
        clip_eps_low: lower clip radius of the importance ratio, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
        aggregation: how per-token losses become one, a key of `aggregation.AGGREGATIONS`.
        sequences: which sequences a mean over sequences counts: `trained` (with a trained token) or `all`.
        loss_scale: constant divisor of `seq_mean_token_sum_norm`, tokens; None with every other mode.
    """

    clip_eps_low: float
    clip_eps_high: float
    aggregation: str
    sequences: str
    loss_scale: float | None

    needs = frozenset[str]()

    def __post_init__(self) -> None:
        check_trust_region(clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high)
        check_aggregation(aggregation=self.aggregation, sequences=self.sequences, loss_scale=self.loss_scale)

    def keep_mask(
        self,
        log_ratio: Float[Tensor, "sample token"],
        advantages: Float[Tensor, "sample token"],
        loss_mask: Bool[Tensor, "sample token"],
    ) -> Bool[Tensor, "sample token"]:
        """Every trained token stays."""
        return loss_mask

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the loss."""
        return clipped_policy_loss(
            inputs,
            clip_eps_low=self.clip_eps_low,
            clip_eps_high=self.clip_eps_high,
            dual_clip=None,
            aggregation=self.aggregation,
            loss_scale=self.loss_scale,
        )


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
    loss_scale: float | None = None,
) -> LossOutput:
    """`GRPO` of plain tensors that are the whole batch, from the rewards of complete groups.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats; carries the gradient. Samples of a group are
            neighbours: sample i belongs to group i // group size.
        behaviour_logprobs: log pi of the sampler, nats.
        rewards: one per sample, a row per group; NaN = no score.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        group_advantage: turns rewards into advantages, for example `GroupRelative(adv_std="population", ...)`.
        clip_eps_low: see `GRPO`, as the rest.
        clip_eps_high: see `GRPO`.
        aggregation: see `GRPO`.
        sequences: see `GRPO`.
        loss_scale: see `GRPO`.

    Raises:
        ValueError: when there is not one reward per sample.
    """
    if rewards.numel() != loss_mask.shape[0]:
        raise ValueError(
            f"rewards must hold one number per sample, got {tuple(rewards.shape)} for {len(loss_mask)} samples"
        )
    loss = GRPO(
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        aggregation=aggregation,
        sequences=sequences,
        loss_scale=loss_scale,
    )
    advantages = group_advantage(rewards).flatten()
    return loss(whole_batch(policy_logprobs, behaviour_logprobs, advantages, loss_mask, sequences=sequences))
