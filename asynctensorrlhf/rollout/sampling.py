"""How a token is drawn: uniforms fixed at admission, then the inverse of the cumulative distribution.

Knows seeds and distributions; does not know models, slots or caches.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from asynctensorrlhf.policy.logprobs import token_logprobs


def draw_uniforms(seed: int, group_id: int, num_samples: int, max_new_tokens: int) -> Float64[Tensor, "sample token"]:
    """Uniforms in [0, 1) of every token that a group may sample.

    Row `i` is a function of (seed, group_id, i, max_new_tokens) alone: neither the size of the group nor what else
    is sampled enters. One counter-based generator a group, no generator call per token.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, group_id], dtype=np.uint64)))
    return torch.from_numpy(generator.random((num_samples, max_new_tokens)))


def uniforms_on(device: torch.device, uniforms: Float64[Tensor, "sample token"]) -> Float[Tensor, "sample token"]:
    """The uniforms on `device`, in float32 where it has no float64 (MPS)."""
    return in_single_precision(uniforms).to(device) if device.type == "mps" else uniforms.to(device)


def in_single_precision(uniforms: Float64[Tensor, "sample token"]) -> Float32[Tensor, "sample token"]:
    """The uniforms rounded to float32, none of them up to 1."""
    return uniforms.to(torch.float32).clamp_(max=1 - 2**-24)


def sample_tokens(
    logits: Float[Tensor, "row vocab"],
    uniforms: Float[Tensor, " row"] | None,
    *,
    temperature: float,
    num_token_ids: int,
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """Draw one token a row from softmax(logits / temperature) over the first `num_token_ids` ids.

    Args:
        logits: of the next token, any float type.
        uniforms: one number in [0, 1) a row; None takes the most likely token.
        temperature: > 0.
        num_token_ids: ids from here on are never drawn.

    Returns:
        The ids and their log-probabilities (nats, float32), by the function that the trainer uses.
    """
    if uniforms is None:
        ids = logits[:, :num_token_ids].argmax(dim=-1)
    else:
        # in the precision of the uniforms, float64 where there is one: a float32 sum over many ids is coarse
        weights = torch.softmax(logits[:, :num_token_ids].to(uniforms.dtype) / temperature, dim=-1)
        cumulative = weights.cumsum(dim=-1)
        target = uniforms[:, None] * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)
    return ids, token_logprobs(logits, ids, temperature=temperature, num_token_ids=num_token_ids)
