"""Rewards of tokens: the pull to the reference at each of them, the score of the sample at the last.

Knows where a score belongs; does not know how rewards become advantages. No host synchronisation.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# as everywhere, log-ratios count up to this much, nats
LOG_RATIO_LIMIT = 20.0


def token_rewards(
    scores: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"], kl: Tensor | None, kl_coef: float
) -> Float[Tensor, "sample token"]:
    """Score at the last trained token of each sample - kl_coef x kl at every trained one; 0 elsewhere.

    Args:
        scores: of the sample, reward units, at each of its tokens; read at the last trained one.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        kl: see `reference_kl`; None: there is no KL term.
        kl_coef: its weight, reward units per nat.

    Source:
        Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    num_later = loss_mask.flip(1).cumsum(dim=1).flip(1)
    rewards = torch.where(loss_mask & (num_later == 1), scores, 0.0)
    return rewards if kl is None else rewards - kl_coef * kl


def reference_kl(
    proximal_logprobs: Float[Tensor, "sample token"],
    ref_logprobs: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
) -> Float[Tensor, "sample token"]:
    """k1 of each trained token: log policy - log reference, nats, within +-20; 0 elsewhere.

    The only estimator whose use in a reward gives the gradient of KL(policy || reference), later tokens included.

    Source:
        arXiv:2512.21852.
    """
    return torch.where(loss_mask, proximal_logprobs - ref_logprobs, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mean_over(values: Float[Tensor, "sample token"], mask: Bool[Tensor, "sample token"]) -> Float[Tensor, ""]:
    """Mean over masked tokens, 0 over none."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)
