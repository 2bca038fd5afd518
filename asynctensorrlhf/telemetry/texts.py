"""Ids as text, for people and dumps.

Knows that the start of a text is special to many decoders; does not know what the text means.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynctensorrlhf.interfaces import Tokenizer


def completion_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
    """decode(prompt + completion) minus decode(prompt), special tokens left out.

    A decoder of the SentencePiece kind drops the space that starts whatever it is given, so a completion
    decoded alone loses its own: " 4" and "4" would read alike. Where the prompt's text is no prefix (a
    character split over the border), it is the completion decoded alone.
    """
    return decoded_pairs(tokenizer, [prompt_ids], [completion_ids])[0][1]


def decoded_pairs(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> list[tuple[str, str]]:
    """(prompt text, `completion_text`) of each sample; a prompt shared by a group is decoded once."""
    prompt_texts: dict[tuple[int, ...], str] = {}
    pairs = []
    for prompt_ids, completion_ids in zip(prompts, completions, strict=True):
        prompt = tuple(prompt_ids)
        if prompt not in prompt_texts:
            prompt_texts[prompt] = _decode(tokenizer, prompt)
        whole = _decode(tokenizer, (*prompt, *completion_ids))
        is_prefix = whole.startswith(prompt_texts[prompt])
        text = whole[len(prompt_texts[prompt]) :] if is_prefix else _decode(tokenizer, completion_ids)
        pairs.append((prompt_texts[prompt], text))
    return pairs


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    # Clean-up of spaces rewrites text across the border: "is ." becomes "is.".
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
