"""How per-token losses become one number.

Knows the five means and their denominators, which always cover the whole optimizer batch, so that the sum over
micro-batches and ranks is the loss of that batch; does not know where per-token losses come from.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class _Over(NamedTuple):
    num_tokens: Tensor | float
    num_sequences: Tensor | float
    loss_scale: float


def _mean_over_own_tokens(
    per_token: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"]
) -> Float[Tensor, " sample"]:
    return per_token.sum(dim=1) / loss_mask.sum(dim=1).clamp(min=1)


AGGREGATIONS: Mapping[str, Callable[[Tensor, Tensor, _Over], Tensor]] = {
    "token_mean": lambda loss, _, over: loss.sum() / over.num_tokens,
    "token_sum": lambda loss, _, over: loss.sum(),
    "seq_mean_token_mean": lambda loss, mask, over: _mean_over_own_tokens(loss, mask).sum() / over.num_sequences,
    "seq_mean_token_sum": lambda loss, _, over: loss.sum() / over.num_sequences,
    "seq_mean_token_sum_norm": lambda loss, _, over: loss.sum() / over.num_sequences / over.loss_scale,
}

SEQUENCE_COUNTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "trained": lambda mask: mask.any(dim=1).sum(),
    "all": lambda mask: torch.full((), mask.shape[0], device=mask.device),
}


def aggregate(
    per_token: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    mode: str,
    global_num_tokens: Tensor | float,
    global_num_sequences: Tensor | float,
    loss_scale: int | float | None = None,
) -> Float[Tensor, ""]:
    """This micro-batch's share of the optimizer batch's loss; shares add up.

    With l the masked per-token loss, N tokens and S sequences of the optimizer batch, each taken as at least 1:
    `token_mean` sum(l) / N; `token_sum` sum(l); `seq_mean_token_mean` sum_i(mean_t l) / S; `seq_mean_token_sum`
    sum(l) / S; `seq_mean_token_sum_norm` sum(l) / (S loss_scale), which has no length bias.

    Args:
        per_token: loss of each token; masked positions may hold anything.
        loss_mask: True on the tokens that are trained.
        mode: a key of `AGGREGATIONS`.
        global_num_tokens: N, as `count_tokens_and_sequences` counts it.
        global_num_sequences: S, counted with the loss's `sequences`.
        loss_scale: constant divisor of `seq_mean_token_sum_norm`, tokens; the other modes don't read it.

    Source:
        Shao et al. 2024, arXiv:2402.03300 (seq_mean_token_mean); DAPO, arXiv:2503.14476 (token_mean); Dr.GRPO,
        arXiv:2503.20783 (seq_mean_token_sum_norm).
    """
    over = _Over(at_least_one(global_num_tokens), at_least_one(global_num_sequences), loss_scale or 1.0)
    return AGGREGATIONS[mode](torch.where(loss_mask, per_token, 0.0), loss_mask, over)


def count_tokens_and_sequences(
    loss_mask: Bool[Tensor, "sample token"], sequences: str
) -> tuple[Int[Tensor, ""], Int[Tensor, ""]]:
    """The two denominators of these samples, to be added over micro-batches and ranks.

    Args:
        loss_mask: True on the tokens that are trained.
        sequences: `trained` counts samples with a trained token, `all` counts every sample (the loss's `sequences`).

    Returns:
        Trained tokens and counted sequences; both can be 0.
    """
    return loss_mask.sum(), SEQUENCE_COUNTS[sequences](loss_mask)


def at_least_one(count: Tensor | float) -> Tensor | float:
    """A denominator that an empty batch can be divided by, without asking the device for its value."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(1.0, count)


def check_aggregation(*, aggregation: str, sequences: str, loss_scale: int | float | None) -> None:
    """Refuse unknown names and a scale that is missing, not positive, or would not be read.

    Raises:
        ValueError: naming the config key, its rule and the value.
    """
    for key, value, allowed in (("aggregation", aggregation, AGGREGATIONS), ("sequences", sequences, SEQUENCE_COUNTS)):
        if value not in allowed:
            raise ValueError(f"loss.{key} must be one of {', '.join(allowed)}, got {value!r}")
    if aggregation == "seq_mean_token_sum_norm":
        if loss_scale is None or not loss_scale > 0:
            raise ValueError(
                f"loss.loss_scale must be > 0 with loss.aggregation=seq_mean_token_sum_norm, got {loss_scale}; "
                "rollout.max_new_tokens is a usual choice"
            )
    elif loss_scale is not None:
        raise ValueError(
            f"loss.loss_scale must be null unless loss.aggregation=seq_mean_token_sum_norm, got {loss_scale}"
        )
