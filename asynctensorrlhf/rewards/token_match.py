"""Rewards from exact matches of token ids.

Knows ids only, which makes it exact on one segmentation and blind to any other; does not know text or numbers.
Batched over samples, on the device of the ids, without a host synchronisation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from asynctensorrlhf.interfaces import Tokenizer
from asynctensorrlhf.types import PromptRow, RewardInputs

# Stands where a sequence has ended; no token has this id.
ENDED = -1
# How much of a prompt decides how a tokenizer splits the answer after it, in characters.
_CONTEXT_CHARS = 4

EosIds = int | Sequence[int] | Int[Tensor, "*eos"] | None
Patterns = Sequence[Int[Tensor, " _"] | Sequence[int]] | Int[Tensor, "*pattern width"]


def tensor_native_reward(
    generated_ids: Int[Tensor, "sample token"],
    answer_patterns: Patterns,
    eos_token_id: EosIds,
    device: torch.device | str | None = None,
    *,
    pattern_lengths: Int[Tensor, " pattern"] | None = None,
) -> Float[Tensor, " sample"]:
    """1.0 where the answer's ids occur, contiguously, before the first EOS of the completion; else 0.0.

    Literal on ids: answer 4 is found in 42 when 42 is two tokens, and a completion that spells the answer with other
    tokens is missed. Use it where answers have one segmentation and can't be part of a longer value.

    Args:
        generated_ids: completions, padded on the right after an EOS.
        answer_patterns: one pattern per sample or a single one for all: a list of 1-D tensors or lists, or one tensor
            padded on the right with negative ids. A pattern ends at its first EOS, so that padding with EOS works too.
        eos_token_id: one id or several, each of which ends a sequence; None: nothing does.
        device: where to compute; None: where the completions are.
        pattern_lengths: ids of each pattern of a padded tensor, when its padding is an ordinary id.

    Returns:
        float32. An empty pattern, and one longer than the completion, give 0.
    """
    completion, pattern = _cut_both(generated_ids, answer_patterns, eos_token_id, device, pattern_lengths)
    return _contains(completion, pattern).float()


def gpu_reward_simple(
    generated_ids: Int[Tensor, "sample token"],
    gt_ids: Patterns,
    eos_token_id: EosIds,
) -> Float[Tensor, " sample"]:
    """1.0 where the completion before its first EOS equals the answer before its own; else 0.0.

    Args:
        generated_ids: completions, padded on the right after an EOS.
        gt_ids: answers, in the forms that `tensor_native_reward` takes.
        eos_token_id: one id or several, each of which ends a sequence; None: nothing does.

    Returns:
        float32. An empty completion equals an empty answer.
    """
    completion, answer = _cut_both(generated_ids, gt_ids, eos_token_id, None, None)
    return _equals(completion, answer).float()


def _cut_both(
    generated_ids: Int[Tensor, "sample token"],
    patterns: Patterns,
    eos_token_id: EosIds,
    device: torch.device | str | None,
    lengths: Int[Tensor, " pattern"] | None,
) -> tuple[Int[Tensor, "sample token"], Int[Tensor, "pattern width"]]:
    device = generated_ids.device if device is None else device
    stops = _stops(eos_token_id)
    if not isinstance(patterns, Tensor):
        rows = [torch.as_tensor(pattern, dtype=torch.long) for pattern in patterns]
        patterns = pad_sequence(rows, batch_first=True, padding_value=ENDED)
    elif patterns.dim() == 1:
        patterns = patterns[None]
    if patterns.shape[0] not in (1, generated_ids.shape[0]):
        raise ValueError(f"there must be 1 or {generated_ids.shape[0]} answers, got {patterns.shape[0]}")
    patterns = patterns.to(device)
    completion = _cut(generated_ids.to(device), stops)
    return completion, _cut(patterns, stops, None if lengths is None else _within(lengths.to(device), patterns))


def _stops(eos_token_id: EosIds) -> tuple[int | Tensor, ...]:
    if eos_token_id is None:
        return ()
    if isinstance(eos_token_id, Tensor):
        return eos_token_id.flatten().unbind()
    return (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)


def _cut(
    ids: Int[Tensor, "*batch token"], stops: Sequence[int | Tensor], is_live: Bool[Tensor, "*batch token"] | None = None
) -> Int[Tensor, "*batch token"]:
    """The ids with `ENDED` from the first stop token, negative id or dead position on."""
    # Compared one by one: making a tensor of Python numbers would be a copy to the device, which synchronises.
    has_ended = reduce(torch.logical_or, (ids == stop for stop in stops), ids < 0)
    if is_live is not None:
        has_ended = has_ended | ~is_live
    return torch.where(has_ended.cumsum(dim=-1) == 0, ids, ENDED)


def _within(lengths: Int[Tensor, "*batch"], ids: Int[Tensor, "*batch token"]) -> Bool[Tensor, "*batch token"]:
    return torch.arange(ids.shape[-1], device=ids.device) < lengths[..., None]


def _contains(
    completion: Int[Tensor, "*#batch token"], pattern: Int[Tensor, "*#batch width"]
) -> Bool[Tensor, "*batch"]:
    pattern = functional.pad(pattern, (0, 1), value=ENDED)
    width = pattern.shape[-1]
    windows = functional.pad(completion, (0, width), value=ENDED).unfold(-1, width, 1)
    is_free = (pattern == ENDED)[..., None, :]
    is_found = ((windows == pattern[..., None, :]) | is_free).all(dim=-1).any(dim=-1)
    return is_found & (pattern[..., 0] != ENDED)


def _equals(completion: Int[Tensor, "*#batch token"], answer: Int[Tensor, "*#batch width"]) -> Bool[Tensor, "*batch"]:
    width = max(completion.shape[-1], answer.shape[-1])
    padded = [functional.pad(ids, (0, width - ids.shape[-1]), value=ENDED) for ids in (completion, answer)]
    return (padded[0] == padded[1]).all(dim=-1)


MATCHERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"whole": _equals, "contains": _contains}


@dataclass(frozen=True, kw_only=True)
class TokenMatch:
    """1 when the completion before its first stop token matches one of the accepted answers' ids, else 0.

    Ids alone are unsafe in two ways. Another segmentation of the right text is missed: only those that the tokenizer
    itself makes of it, alone and right after the prompt, are known. And `contains` is literal: 4 is found in 42 where
    these are the ids of 4 and 2, also in -4 and 0.4. With one token per character, `whole` has neither.

    Attributes:
        mode: `whole`: the completion equals the answer; `contains`: the answer's ids occur in it.
        answer_column: column that holds the answer, a text, or a list of accepted texts.
        stop_token_ids: ids that end a completion: the first one and what follows never count. At the end of an answer
            they are left out.
    """

    mode: str
    answer_column: str
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.mode not in MATCHERS:
            raise ValueError(f"reward.mode must be one of {', '.join(MATCHERS)}, got {self.mode!r}")

    def encode(self, rows: Sequence[PromptRow], tokenizer: Tokenizer) -> dict[str, Tensor]:
        """The answers' ids, tokenised without special tokens, alone and, where that differs, after their prompt.

        Returns:
            `answer_ids` [row, answer, width], padded on the right with -1, and `answer_lengths` [row, answer]; 0 is
            the length of no answer.

        Raises:
            ValueError: naming the row, when its answer is missing, is not text, has no tokens, or could not be sampled
                whole because of a stop token within it.
        """
        texts = [self._accepted_texts(row_id, row.columns) for row_id, row in enumerate(rows)]
        flat = [
            (row.text[-_CONTEXT_CHARS:], text) for row, accepted in zip(rows, texts, strict=True) for text in accepted
        ]
        encoded = iter(_segmentations(flat, tokenizer))
        answers = [
            [self._up_to_stop(row_id, text, ids) for text in accepted for ids in next(encoded)]
            for row_id, accepted in enumerate(texts)
        ]
        num_answers = max(map(len, answers), default=0)
        width = max((len(ids) for accepted in answers for ids in accepted), default=0)
        answer_ids = torch.full((len(rows), num_answers, width), ENDED)
        for row_id, accepted in enumerate(answers):
            for place, ids in enumerate(accepted):
                answer_ids[row_id, place, : len(ids)] = torch.tensor(ids)
        return {"answer_ids": answer_ids, "answer_lengths": (answer_ids != ENDED).sum(dim=-1)}

    def __call__(self, batch: RewardInputs) -> Float[Tensor, " sample"]:
        """1.0 or 0.0 per sample, float32."""
        completion = _cut(batch.completion_ids, self.stop_token_ids, batch.completion_mask)
        lengths = batch.answers["answer_lengths"]
        answers = _cut(batch.answers["answer_ids"], self.stop_token_ids, _within(lengths, batch.answers["answer_ids"]))
        is_match = MATCHERS[self.mode](completion[:, None], answers) & (lengths > 0)
        return is_match.any(dim=1).float()

    def _accepted_texts(self, row_id: int, columns: Mapping[str, Any]) -> list[str]:
        if self.answer_column not in columns:
            raise ValueError(
                f"reward.answer_column: row {row_id} has no column {self.answer_column!r}; it has {', '.join(columns)}"
            )
        answer = columns[self.answer_column]
        accepted = list(answer) if isinstance(answer, list | tuple) else [answer]
        if not accepted or not all(isinstance(text, str) for text in accepted):
            raise ValueError(
                f"reward.answer_column: {self.answer_column!r} of row {row_id} must be a text or a list of texts, "
                f"got {answer!r}"
            )
        return accepted

    def _up_to_stop(self, row_id: int, text: str, ids: Sequence[int]) -> Sequence[int]:
        stops = [place for place, token in enumerate(ids) if token in self.stop_token_ids]
        length = stops[0] if stops else len(ids)
        if not length or len(ids) - length > len(stops):
            raise ValueError(
                f"reward.answer_column: {self.answer_column!r} of row {row_id} must have a token before any stop token "
                f"and none after it, got {text!r}"
            )
        return ids[:length]


def _segmentations(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[list[Sequence[int]]]:
    """Ids of each (context, text): of the text alone and, where they differ, of the text right after its context.

    A tokenizer of the SentencePiece kind marks the start of whatever it is given with a space, which a completion right
    after its prompt does not begin with.
    """
    distinct = list(dict.fromkeys(part for context, text in texts for part in (context, text, context + text)))
    all_ids = tokenizer(distinct, add_special_tokens=False)["input_ids"] if distinct else []
    ids_of = dict(zip(distinct, all_ids, strict=True))
    found = []
    for context, text in texts:
        alone, before, whole = ids_of[text], ids_of[context], ids_of[context + text]
        after = whole[len(before) :] if whole[: len(before)] == before else []
        found.append([alone, after] if after and after != alone else [alone])
    return found
