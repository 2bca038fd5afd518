"""Rows as a file holds them, in plain Python values.

Knows places, columns and the exact text of an answer; does not know file formats or tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RawRow:
    """One row of a file.

    Attributes:
        place: file and line or row, for people: `my.jsonl, line 3`.
        columns: plain Python values.
        answer: value of the answer column, numbers as the text that spells them where the format has one.
    """

    place: str
    columns: Mapping[str, Any]
    answer: Any


@dataclass(frozen=True)
class Table:
    """All rows of a file.

    Attributes:
        key: the config key that named the file.
        path: the file.
        rows: in the file's order.
        num_blank_lines: lines that held nothing.
    """

    key: str
    path: str
    rows: list[RawRow]
    num_blank_lines: int = 0

    def column_names(self) -> list[str]:
        """Names of all columns that any row has, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row.columns))


# Config key, path, answer column -> rows.
ReadTable = Callable[[str, str, str | None], Table]


def unreadable(key: str, path: str, error: OSError) -> ValueError:
    """The error for a file that can't be opened."""
    reason = error.strerror or str(error)
    return ValueError(f"{key} must name a readable file, got {path!r}: {reason} (relative paths start at {Path.cwd()})")


def check_column(table: Table, *, key: str, name: str, hint: str = "") -> None:
    """Refuse a table without the column; the error lists those present and the nearest name."""
    present = table.column_names()
    if name in present:
        return
    lowered = {column.lower(): column for column in present}
    nearest = get_close_matches(name.lower(), lowered, n=1)
    guess = f"; did you mean {lowered[nearest[0]]!r}?" if nearest else ""
    raise ValueError(f"{key} must be a column of {table.path}, got {name!r}; it has {', '.join(present)}{guess}{hint}")


def without_nulls(value: Any) -> Any:
    """The value without the keys of nested dicts that hold null.

    Columnar files give every dict the union of all keys, so null and absent can't be told apart there; a
    template that asks `is defined` must see the same from every format.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def exact_answer(value: Any) -> str | list[str]:
    """The text of a gold answer, or of each accepted answer of a list; numbers as spelt, never cast.

    Raises:
        ValueError: null, true or false, an empty list, or anything else that has no one text.
    """
    if isinstance(value, list) and value:
        return [_answer_text(item) for item in value]
    return _answer_text(value)


def _answer_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return repr(value)
    raise ValueError(f"the answer must be a text, a number or a list of them, got {value!r}; write it as a text")
