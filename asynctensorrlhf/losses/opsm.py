"""Off-policy sequence masking: bad sequences that the policy has left behind stop counting.

Knows the mask and the clip that it stands before; does not know advantages of other kinds than per token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.policy_loss import Surrogate, Terms
from asynctensorrlhf.losses.ppo import PPO
from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio


def off_policy_sequence_mask(
    log_ratio: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    sequence_kl_threshold: float,
) -> Bool[Tensor, "sample token"]:
    """Trained tokens that stay: all but those with A < 0 in a sequence of mean(log sampler - log policy) > threshold.

    Sequences have one sign of advantage with group-relative advantages and go as a whole; with advantages per token
    only their bad tokens go. Log-ratios [-0.9, -0.3] of A = -1 have a mean of 0.6 and go at a threshold of 0.5.

    Args:
        log_ratio: policy minus sampler, nats, 0 where masked.
        advantages: reward units.
        loss_mask: True on the tokens that are trained.
        sequence_kl_threshold: nats per token.

    Source:
        DeepSeek-V3.2, arXiv:2512.02556; the denominator stays as it was.
    """
    sequence_kl = -geometric_log_ratio(log_ratio.detach(), loss_mask)
    return loss_mask & ~((advantages < 0) & (sequence_kl > sequence_kl_threshold)[:, None])


@dataclass(frozen=True, kw_only=True)
class OPSM(PPO):
    """The clipped surrogate without the tokens that `off_policy_sequence_mask` drops; they stay in the denominator.

    The distance is always to the sampler, whatever the proximal policy: staleness and engine mismatch both count.

    Attributes:
        sequence_kl_threshold: nats per token, >= 0; 0.5 in TRL's docs, 1e-4 in slime.
    """

    sequence_kl_threshold: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sequence_kl_threshold >= 0:
            raise ValueError(f"loss.sequence_kl_threshold must be >= 0, got {self.sequence_kl_threshold}")

    def surrogate(self, terms: Terms) -> Surrogate:
        """PPO's, 0 for dropped tokens."""
        clipped = super().surrogate(terms)
        keep = off_policy_sequence_mask(
            terms.behaviour_log_ratio, terms.advantages, terms.loss_mask, self.sequence_kl_threshold
        )
        # the log-ratios are clamped, so that the branch that is not taken is finite
        per_token = torch.where(keep, clipped.per_token, 0.0)
        return Surrogate(per_token, {**clipped.metrics, "loss/masked_fraction": terms.fraction(~keep)})
