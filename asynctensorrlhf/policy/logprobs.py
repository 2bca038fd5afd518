"""Log-probabilities of token ids under a model's logits: the one function that engine and trainer share.

Knows temperature, the legal ids and how many logits may live at once; does not know where hidden states come from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# The exponential of anything below is exactly 0; of a forbidden id log p is -inf, whose product with p would be NaN.
_LOG_OF_ZERO = -1e4


def token_logprobs(
    logits: Float[Tensor, "*batch vocabulary"],
    ids: Int[Tensor, "*batch"],
    *,
    temperature: float,
    num_token_ids: int,
) -> Float[Tensor, "*batch"]:
    """log_softmax(logits / temperature) of each id, in nats and float32 (float64 for float64 logits).

    Args:
        logits: of one position each; columns at or beyond `num_token_ids` pad the vocabulary and are left out.
        ids: below `num_token_ids`.
        temperature: of sampling, > 0.
        num_token_ids: ids that can be sampled.

    Returns:
        One value per id; carries the gradient of `logits`.
    """
    scores = _log_softmax(logits, temperature=temperature, num_token_ids=num_token_ids)
    return scores.gather(-1, ids[..., None]).squeeze(-1)


def scores_from_logits(
    logits: Float[Tensor, "*batch vocabulary"],
    ids: Int[Tensor, "*batch"],
    *,
    temperature: float,
    num_token_ids: int,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """`token_logprobs` and the entropy of each position, a chunk of positions at a time, forward and backward.

    Beyond the logits and their gradient (of the same size and type, filled chunk by chunk), the float32 scores of at
    most `chunk_tokens` positions are alive, of two positions where that is 1. Logits that can't be flattened without a
    copy, as `logits[:, :-1]`, are copied.

    Args:
        logits: of one position each; columns at or beyond `num_token_ids` pad the vocabulary and are left out.
        ids: below `num_token_ids`.
        temperature: of sampling, > 0.
        num_token_ids: ids that can be sampled.
        chunk_tokens: positions whose scores are held at once, at least 1.
        entropy_gradient: whether the entropy carries a gradient; it is detached otherwise.

    Returns:
        Log-probs and entropies in nats, float32 (float64 for float64 logits). Differentiable once.
    """
    # the arithmetic holds two numbers for each score, so it goes by half chunks
    logprobs, entropy = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]),
        ids.reshape(-1),
        _Scoring(temperature, num_token_ids, max(1, chunk_tokens // 2), entropy_gradient),
    )
    return logprobs.view(ids.shape), entropy.view(ids.shape)


def logprobs_from_hidden(
    hidden: Float[Tensor, "token hidden"],
    head: nn.Module,
    ids: Int[Tensor, " token"],
    *,
    temperature: float,
    num_token_ids: int,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"]]:
    """`token_logprobs` and the entropy (nats) of each position, never holding more than one chunk of logits.

    Args:
        hidden: last hidden state that predicts each id.
        head: maps hidden states to logits.
        ids: the ids whose log-probability is asked.
        temperature: of sampling, > 0.
        num_token_ids: ids that can be sampled.
        chunk_tokens: positions whose logits are held at once; with several chunks the backward pass makes them anew.
        entropy_gradient: whether the entropy carries a gradient; it is detached otherwise.
    """

    def score(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return scores_from_logits(
            head(hidden),
            ids,
            temperature=temperature,
            num_token_ids=num_token_ids,
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )

    if len(ids) <= chunk_tokens:
        return score(hidden, ids)
    chunks = zip(hidden.split(chunk_tokens), ids.split(chunk_tokens), strict=True)
    parts = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class _Scoring(NamedTuple):
    temperature: float
    num_token_ids: int
    num_rows: int
    entropy_gradient: bool


class _ChunkedScores(torch.autograd.Function):
    """Log-probs and entropies of rows of logits; keeps the logits and one number a row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, scoring: _Scoring) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty_like(ids, dtype=_wide(logits))
        entropy = torch.empty_like(logprobs)
        for rows in _slices(len(ids), scoring.num_rows):
            logprobs[rows], entropy[rows] = _chosen_and_entropy(_scores(logits[rows], scoring), ids[rows])
        ctx.save_for_backward(logits, ids, entropy)
        ctx.scoring = scoring
        if not scoring.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropy: Tensor) -> tuple[Tensor, None, None]:
        (logits, ids, entropy), scoring = ctx.saved_tensors, ctx.scoring
        gradient = torch.empty_like(logits)
        gradient[:, scoring.num_token_ids :] = 0
        for rows in _slices(len(ids), scoring.num_rows):
            scores = _scores(logits[rows], scoring)
            if scoring.entropy_gradient:
                weights = _weights(scores, entropy[rows], of_logprobs[rows], of_entropy[rows])
            else:
                weights = scores.exp_().mul_(of_logprobs[rows, None])
            # d log p_target / d z = 1[target] - p, z the logits over the temperature
            weights.neg_().scatter_add_(1, ids[rows, None], of_logprobs[rows, None])
            gradient[rows, : scoring.num_token_ids] = weights.div_(scoring.temperature)
            del scores, weights
        return gradient, None, None


def _slices(num_tokens: int, num_rows: int) -> list[slice]:
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]


def _scores(logits: Tensor, scoring: _Scoring) -> Tensor:
    return _log_softmax(logits, temperature=scoring.temperature, num_token_ids=scoring.num_token_ids)


def _chosen_and_entropy(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of log-probs over the vocabulary, which are overwritten: those of the ids, and -sum(p log p)."""
    chosen = scores.gather(1, ids[:, None]).squeeze(1)
    return chosen, -scores.exp().mul_(scores.clamp_(min=_LOG_OF_ZERO)).sum(1)


def _weights(scores: Tensor, entropy: Tensor, of_logprobs: Tensor, of_entropy: Tensor) -> Tensor:
    """What the backward pass subtracts, p (of_logprobs + of_entropy (log p + H)); the scores are overwritten."""
    # as d H / d z = -p (log p + H)
    probs = scores.exp()
    surprise = scores.clamp_(min=_LOG_OF_ZERO).add_(entropy[:, None])
    return surprise.mul_(of_entropy[:, None]).add_(of_logprobs[:, None]).mul_(probs)


def _log_softmax(logits: Tensor, *, temperature: float, num_token_ids: int) -> Tensor:
    # float32 before the division: a bf16 quotient or normaliser is off by per cents in the ratio
    return torch.log_softmax(logits[..., :num_token_ids].to(_wide(logits)) / temperature, dim=-1)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)
