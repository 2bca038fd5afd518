"""PPO: the clipped surrogate, by default averaged over the tokens of the whole batch.

Knows PPO's settings; does not know where advantages come from: group-relative or GAE.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.diagnostics import clip_fractions
from asynctensorrlhf.losses.policy_loss import PLAIN, PolicyLoss, Surrogate, Terms, whole_batch
from asynctensorrlhf.losses.surrogate import check_trust_region, clipped_surrogate
from asynctensorrlhf.types import LossOutput


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyLoss):
    """Clipped surrogate loss of policy over proximal log-probabilities (arXiv:1707.06347, eq. 7).

    A bad token (A = -1) of ratio 2 costs 2, or `dual_clip` if that is less; a good one (A = 1) costs -1.2 with
    `clip_eps_high` 0.2 and has no gradient.

    Attributes:
        clip_eps_low: lower clip radius of the importance ratio, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
        dual_clip: bound on the loss of negative advantages, as a ratio > 1; None: unbounded.
    """

    clip_eps_low: float
    clip_eps_high: float
    dual_clip: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trust_region(clip_eps_low=self.clip_eps_low, clip_eps_high=self.clip_eps_high, dual_clip=self.dual_clip)

    def surrogate(self, terms: Terms) -> Surrogate:
        """-min(r A, clip(r) A), at most -dual_clip A where A < 0."""
        radii = {"clip_eps_low": self.clip_eps_low, "clip_eps_high": self.clip_eps_high}
        fractions = clip_fractions(
            terms.log_ratio,
            terms.advantages,
            **radii,
            dual_clip=self.dual_clip,
            global_num_tokens=terms.global_num_tokens,
        )
        per_token = clipped_surrogate(terms.log_ratio, terms.advantages, **radii, dual_clip=self.dual_clip)
        return Surrogate(per_token, fractions)


def compute_ppo_loss(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"] | Float[Tensor, " sample"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: str = "token_mean",
    sequences: str = "trained",
    loss_scale: int | float | None = None,
) -> LossOutput:
    """`PPO` of plain tensors that are the whole batch.

    Args:
        policy_logprobs: log pi_theta of the sampled tokens, nats; carries the gradient.
        behaviour_logprobs: log pi of the sampler, nats.
        advantages: reward units; one per token, or one per sample for all its tokens.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        clip_eps_low: see `PPO`, as the rest.
        clip_eps_high: see `PPO`.
        dual_clip: see `PPO`.
        aggregation: see `PPO`.
        sequences: see `PPO`.
        loss_scale: see `PPO`.
    """
    loss = PPO(
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        dual_clip=dual_clip,
        aggregation=aggregation,
        sequences=sequences,
        loss_scale=loss_scale,
        **PLAIN,
    )
    return loss(whole_batch(policy_logprobs, behaviour_logprobs, advantages, loss_mask, sequences=sequences))
