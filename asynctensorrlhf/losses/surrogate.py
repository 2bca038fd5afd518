"""The pure per-token pieces of the policy losses.

Knows how a log-ratio is made safe and how a trust region clips it; does not know masks' denominators or metrics.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0


def log_ratio(
    policy_logprobs: Float[Tensor, "sample token"],
    other_logprobs: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    limit: float = LOG_RATIO_LIMIT,
) -> Float[Tensor, "sample token"]:
    """Policy minus another log-probability, 0 where masked, clamped to +-`limit` nats.

    Masking comes before the clamp and the clamp before any exp: `where(mask, exp(x), 0)` has a finite value but
    back-propagates 0 * inf = NaN from a poisoned masked position.

    Args:
        policy_logprobs: log pi_theta, nats; carries the gradient.
        other_logprobs: the policy it is compared with, nats; a constant, detached here.
        loss_mask: True on the tokens that count.
        limit: bound on the absolute value, nats, > 0.

    Returns:
        float32, or float64 when the policy's are float64. The gradient is zero at masked and at clamped positions;
        NaN at a live position stays NaN.
    """
    dtype = torch.promote_types(policy_logprobs.dtype, torch.float32)
    difference = policy_logprobs.to(dtype) - other_logprobs.detach().to(dtype)
    return torch.where(loss_mask, difference, 0.0).clamp(-limit, limit)


def masked_advantages(
    advantages: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"], dtype: torch.dtype
) -> Float[Tensor, "sample token"]:
    """Advantages as constants of the given dtype, 0 where masked: no intermediate gradient is NaN there either."""
    return torch.where(loss_mask, advantages.detach().to(dtype), 0.0)


def clipped_surrogate(
    log_ratio: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    *,
    clip_eps_low: float | Tensor,
    clip_eps_high: float | Tensor,
    dual_clip: float | None = None,
) -> Float[Tensor, "sample token"]:
    """Per-token loss -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(log_ratio); to be minimised.

    With `dual_clip` c, tokens with A < 0 lose at most -c A: a large ratio on a bad token has no gradient.

    Args:
        log_ratio: policy minus behaviour log-probability, nats, already safe for exp; carries the gradient.
        advantages: reward units, detached.
        clip_eps_low: lower clip radius, in (0, 1).
        clip_eps_high: upper clip radius, > 0.
        dual_clip: bound on the loss of negative advantages, as a ratio > 1; None: unbounded.

    Returns:
        Unmasked and unreduced; the caller masks and divides by the global denominators.

    Source:
        Schulman et al. 2017, eq. 7, arXiv:1707.06347; separate radii: DAPO, arXiv:2503.14476; dual clip:
        Ye et al. 2019, arXiv:1912.09729.
    """
    ratio = log_ratio.exp()
    # clamp takes two numbers or two tensors
    low: Any = 1.0 - clip_eps_low
    high: Any = 1.0 + clip_eps_high
    clipped_ratio = ratio.clamp(low, high)
    per_token = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if dual_clip is None:
        return per_token
    # Binds for A < 0 only: a good token's loss is never positive.
    return torch.minimum(per_token, advantages.abs() * dual_clip)


def weighted_policy_gradient(
    policy_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    weights: Float[Tensor, "sample token"],
) -> Float[Tensor, "sample token"]:
    """Per-token loss -w A log pi with constant weights w: the gradient is that of REINFORCE, scaled token by token.

    A worked number: log pi = -2, A = 1, w = 0.5 cost 1 and have the gradient -0.5.

    Args:
        policy_logprobs: log pi_theta, nats, 0 where masked; carries the gradient.
        advantages: reward units, detached, 0 where masked.
        weights: importance weights; detached here.

    Source:
        Williams 1992; the weights' names: `policy_gradient.py`.
    """
    return -weights.detach() * advantages * policy_logprobs


def check_trust_region(*, clip_eps_low: float, clip_eps_high: float, dual_clip: float | None = None) -> None:
    """Refuse radii that no trust region has.

    Raises:
        ValueError: naming the config key, its rule and the value.
    """
    if not 0 < clip_eps_low < 1:
        raise ValueError(f"loss.clip_eps_low must be in (0, 1), got {clip_eps_low}")
    if not clip_eps_high > 0:
        raise ValueError(f"loss.clip_eps_high must be > 0, got {clip_eps_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"loss.dual_clip must be > 1 or null, got {dual_clip}")
