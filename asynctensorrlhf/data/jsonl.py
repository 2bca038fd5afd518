"""JSON Lines as a source of prompts.

Knows how such a file is read, byte by byte where it matters; what its rows become is the concern of `rows`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.data.prompt_file import PromptFile
from asynctensorrlhf.data.prompt_ids import PromptTokenizer
from asynctensorrlhf.data.table import RawRow, Table, unreadable, without_nulls

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def jsonl(
    *,
    tokenizer: PromptTokenizer,
    seed: int,
    eval_draws: int,
    context_limit: int,
    path: str,
    heldout_path: str | None,
    prompt_column: str,
    answer_column: str | None,
    template: str | None,
    template_file: str | None,
    chat_template_kwargs: Mapping[str, Any],
    max_prompt_tokens: int | None,
    too_long: str,
    num_epochs: int | None,
    shuffle: bool,
) -> PromptData:
    """Prompts of a file of one JSON object a line; arguments as in `PromptFile`.

    Raises:
        ValueError: naming the config key, and the line where there is one.
    """
    return PromptFile(
        read=read_jsonl,
        tokenizer=tokenizer,
        seed=seed,
        eval_draws=eval_draws,
        context_limit=context_limit,
        path=path,
        heldout_path=heldout_path,
        prompt_column=prompt_column,
        answer_column=answer_column,
        template=template,
        template_file=template_file,
        chat_template_kwargs=chat_template_kwargs,
        max_prompt_tokens=max_prompt_tokens,
        too_long=too_long,
        num_epochs=num_epochs,
        shuffle=shuffle,
    ).load()


def read_jsonl(key: str, path: str, answer_column: str | None) -> Table:
    r"""Read a file of UTF-8 JSON objects, one a line; blank lines are counted, byte order marks skipped.

    Lines end at \n and nowhere else: U+2028 and its like may stand inside a text.

    Args:
        key: config key that named the file, for errors.
        path: the file; a relative one starts at the current folder.
        answer_column: its numbers keep their spelling.

    Raises:
        ValueError: no such file, or a line that is not one JSON object with distinct keys.
    """
    rows: list[RawRow] = []
    num_blank_lines = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                # Not only on the first line: files that carry a mark get concatenated.
                text = line.removeprefix(_BYTE_ORDER_MARK)
                if text.strip():
                    rows.append(_parse(key, f"{path}, line {number}", text, answer_column))
                else:
                    num_blank_lines += 1
    except OSError as error:
        raise unreadable(key, path, error) from error
    return Table(key, path, rows, num_blank_lines)


def _parse(key: str, place: str, line: bytes, answer_column: str | None) -> RawRow:
    try:
        text = line.decode()
        row = json.loads(text, object_pairs_hook=_distinct)
        if not isinstance(row, dict):
            raise ValueError(f"must be one JSON object, got {text.strip()[:40]!r}")
        # An escape can spell half of a surrogate pair: a text that no tokenizer takes.
        if "\\u" in text:
            json.dumps(row, ensure_ascii=False).encode()
        answer = json.loads(text, parse_int=str, parse_float=str).get(answer_column)
    except json.JSONDecodeError as error:
        raise ValueError(f"{key}: {place}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{key}: {place}: {error}") from error
    return RawRow(place, {name: without_nulls(value) for name, value in row.items()}, answer)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that occurs twice is refused, because readers disagree on which value counts."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return row
