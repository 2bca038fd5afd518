"""Log-probabilities of token ids under a model's logits: the one function that engine and trainer share.

Knows temperature, the legal ids and how many logits may live at once; does not know where hidden states come from.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def token_logprobs(
    logits: Float[Tensor, "*batch vocabulary"],
    ids: Int[Tensor, "*batch"],
    *,
    temperature: float,
    num_token_ids: int,
) -> Float[Tensor, "*batch"]:
    """log_softmax(logits / temperature) of each id, in nats and float32 whatever the logits hold.

    Args:
        logits: of one position each; rows at or beyond `num_token_ids` pad the vocabulary and are left out.
        ids: below `num_token_ids`.
        temperature: of sampling, > 0.
        num_token_ids: ids that can be sampled.

    Returns:
        One value per id; carries the gradient of `logits`.
    """
    scores = _log_softmax(logits, temperature=temperature, num_token_ids=num_token_ids)
    return scores.gather(-1, ids[..., None]).squeeze(-1)


def logprobs_from_hidden(
    hidden: Float[Tensor, "token hidden"],
    head: nn.Module,
    ids: Int[Tensor, " token"],
    *,
    temperature: float,
    num_token_ids: int,
    chunk_tokens: int,
) -> tuple[Float[Tensor, " token"], Float[Tensor, " token"]]:
    """`token_logprobs` and the entropy (detached, nats) of each position, never holding more than one chunk of logits.

    Args:
        hidden: last hidden state that predicts each id.
        head: maps hidden states to logits.
        ids: the ids whose log-probability is asked.
        temperature: of sampling, > 0.
        num_token_ids: ids that can be sampled.
        chunk_tokens: positions whose logits are held at once; with several chunks the backward pass makes them anew.
    """

    def score(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = _log_softmax(head(hidden), temperature=temperature, num_token_ids=num_token_ids)
        constant = scores.detach()
        # entr(p) = -p log p is 0 at p = 0, where p * log p of a forbidden id would be NaN
        entropy = torch.special.entr(constant.exp()).sum(-1)
        return scores.gather(-1, ids[:, None]).squeeze(-1), entropy

    if len(ids) <= chunk_tokens:
        return score(hidden, ids)
    chunks = zip(hidden.split(chunk_tokens), ids.split(chunk_tokens), strict=True)
    parts = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _log_softmax(logits: Tensor, *, temperature: float, num_token_ids: int) -> Tensor:
    # float32 before the division: a bf16 quotient or normaliser is off by per cents in the ratio
    return torch.log_softmax(logits[..., :num_token_ids].float() / temperature, dim=-1)
