"""The value head's loss.

Knows the clipped square error; does not know how returns are estimated.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.aggregation import at_least_one
from asynctensorrlhf.types import LossOutput


def clipped_value_loss(
    values: Float[Tensor, "sample token"],
    old_values: Float[Tensor, "sample token"],
    returns: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    clip_eps: float | None,
    global_num_tokens: Tensor | float,
) -> LossOutput:
    """Half the mean over trained tokens of max((V - R)^2, (V_old + clip(V - V_old, +-eps) - R)^2).

    V = 0.6, V_old = 0.2, R = 1 and eps 0.2 cost 0.5 max(0.16, 0.36) = 0.18 without gradient: V moved far enough.

    Args:
        values: V of the state before each token, reward units; carries the gradient.
        old_values: V at the start of the step.
        returns: what V should have been.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        clip_eps: how far V may move in a step, reward units, > 0; None: anywhere.
        global_num_tokens: trained tokens of the optimizer batch.

    Source:
        Schulman et al. 2017, arXiv:1707.06347, as in OpenAI baselines, TRL and verl.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    now = torch.where(loss_mask, values.to(dtype), 0.0)
    old = torch.where(loss_mask, old_values.detach().to(dtype), 0.0)
    target = torch.where(loss_mask, returns.detach().to(dtype), 0.0)
    error = (now - target).square()
    per_token, is_clipped = error, torch.zeros_like(loss_mask)
    if clip_eps is not None:
        step = now - old
        clipped_error = (old + step.clamp(-clip_eps, clip_eps) - target).square()
        # within the radius both errors are one number, and which is larger only a matter of rounding
        is_near = step.abs() <= clip_eps
        per_token = torch.where(is_near, error, torch.maximum(error, clipped_error))
        is_clipped = ~is_near & (clipped_error > error)
    num_tokens = at_least_one(global_num_tokens)
    loss = 0.5 * per_token.sum() / num_tokens
    clip_fraction = (is_clipped & loss_mask).to(dtype).sum() / num_tokens
    return LossOutput(loss, {"value/loss": loss.detach(), "value/clip_fraction": clip_fraction})
