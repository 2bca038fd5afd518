"""What several kinds of vectors need: names of means, the frame of a loss, gradients.

Knows how a vector's words map to the package's; does not know a vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.bench.vectors.fields import Vector
from asynctensorrlhf.interfaces import Loss
from asynctensorrlhf.losses.aggregation import AGGREGATIONS, aggregate, count_tokens_and_sequences
from asynctensorrlhf.losses.policy_loss import PLAIN
from asynctensorrlhf.types import LossInputs, LossOutput

T = TypeVar("T")

MEANS: Mapping[str, str] = {name.replace("_", "-"): name for name in AGGREGATIONS}
"""`loss_agg_mode` to `loss.aggregation`."""

SCALED = "seq_mean_token_sum_norm"


def mean_of(vector: Vector) -> dict[str, Any]:
    """How the vector's loss averages, as arguments of a loss."""
    mode = vector.config.choice("loss_agg_mode", MEANS)
    return {
        "aggregation": mode,
        "sequences": "trained",
        "loss_scale": vector.config.number("scale") if mode == SCALED else None,
    }


TOKEN_MEAN: Mapping[str, Any] = {"aggregation": "token_mean", "sequences": "trained", "loss_scale": None}


def average(
    per_token: Float[Tensor, "sample token"],
    mask: Bool[Tensor, "sample token"],
    mode: str = "token_mean",
    *,
    sequences: str = "trained",
    loss_scale: int | float | None = None,
) -> Float[Tensor, ""]:
    """`aggregate` over tensors that are the whole batch."""
    num_tokens, num_sequences = count_tokens_and_sequences(mask, sequences)
    return aggregate(
        per_token,
        mask,
        mode=mode,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
        loss_scale=loss_scale,
    )


def frame(vector: Vector) -> dict[str, Any]:
    """Arguments of a loss that only has a trust region, averaged as the vector says."""
    return {**PLAIN, **mean_of(vector)}


def radii(vector: Vector) -> dict[str, Any]:
    """Clip radii."""
    return {"clip_eps_low": vector.config.number("eps_low"), "clip_eps_high": vector.config.number("eps_high")}


def run_loss(loss: Loss, inputs: LossInputs) -> tuple[LossOutput, Float[Tensor, "sample token"]]:
    """The loss's output and its gradient with respect to the policy's log-probs."""
    leaf = inputs.policy_logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, policy_logprobs=leaf))
    return output, gradient(output.loss, leaf)


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """D value / d leaf; 0 when nothing leads from one to the other."""
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(value, leaf, materialize_grads=True, retain_graph=True)
    return found


def by_kind(name: str, kinds: Mapping[str, Callable[..., T]], *arguments: Any) -> T:
    """What the kind whose pattern is the whole name makes; groups of the pattern come as further arguments.

    Raises:
        ValueError: no pattern fits.
    """
    for pattern, make in kinds.items():
        if found := re.fullmatch(pattern, name):
            return make(*arguments, *found.groups())
    raise ValueError(f"unknown kind {name!r}; known are {', '.join(kinds)}")
