"""Time and memory of log-probs and entropy from logits: everything at once, or a chunk of positions at a time.

Knows the two ways; does not know a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asynctensorrlhf.bench.memory import peak_bytes
from asynctensorrlhf.bench.timing import time_pairs
from asynctensorrlhf.policy.logprobs import scores_from_logits

Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def naive_scores(
    logits: Float[Tensor, "*batch vocabulary"], ids: Int[Tensor, "*batch"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """Log-probs of ids and entropies at temperature 1 as they are written without a thought of memory."""
    scores = torch.log_softmax(logits, dim=-1)
    return scores.gather(-1, ids[..., None]).squeeze(-1), -(scores.exp() * scores).sum(dim=-1)


def measure(
    *,
    num_positions: tuple[int, int],
    vocabulary_size: int,
    chunk_tokens: int,
    num_pairs: int,
    seed: int,
    device: torch.device,
) -> dict[str, Any]:
    """Forward and backward of both ways, with the gradient of log-probs and with that of the entropy as well.

    Returns:
        Size of the float32 logits, and for each of the two: median seconds, median ratio of chunked over naive in
        pairs, peak bytes beyond the logits as multiples of their size.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((*num_positions, vocabulary_size), generator=generator).mul_(2).to(device).requires_grad_()
    ids = torch.randint(vocabulary_size, num_positions, generator=generator).to(device)
    input_bytes = logits.numel() * logits.element_size()
    result: dict[str, Any] = {"logits_shape": list(logits.shape), "logits_mb": input_bytes / 1e6}
    for name, entropy_gradient in (("logprobs", False), ("logprobs_and_entropy", True)):
        naive = _forward_and_backward(naive_scores, logits, ids, entropy_gradient=entropy_gradient)
        chunked = _forward_and_backward(_chunked(chunk_tokens, entropy_gradient), logits, ids, entropy_gradient)
        pairs = time_pairs(naive, chunked, num_pairs=num_pairs, device=device)
        result[name] = {
            "naive_median_s": pairs.baseline_s,
            "chunked_median_s": pairs.other_s,
            "time_ratio": pairs.ratio,
            "naive_peak_of_logits": peak_bytes(naive, logits, ids) / input_bytes,
            "chunked_peak_of_logits": peak_bytes(chunked, logits, ids) / input_bytes,
        }
    return result


def _chunked(chunk_tokens: int, entropy_gradient: bool) -> Scores:
    def scores(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return scores_from_logits(
            logits,
            ids,
            temperature=1.0,
            num_token_ids=logits.shape[-1],
            chunk_tokens=chunk_tokens,
            entropy_gradient=entropy_gradient,
        )

    return scores


def _forward_and_backward(scores: Scores, logits: Tensor, ids: Tensor, entropy_gradient: bool) -> Callable[[], None]:
    def run() -> None:
        logprobs, entropy = scores(logits, ids)
        total = logprobs.sum() + entropy.sum() if entropy_gradient else logprobs.sum()
        # not into .grad, which would stay alive
        torch.autograd.grad(total, logits)

    return run
