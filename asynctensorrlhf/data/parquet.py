"""Parquet files as a source of prompts.

Knows how such a file is read; what its rows become is the concern of `rows`, as for JSON Lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.data.prompt_file import PromptFile
from asynctensorrlhf.data.prompt_ids import PromptTokenizer
from asynctensorrlhf.data.table import RawRow, Table, unreadable, without_nulls


def parquet(
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
    """Prompts of a parquet file, with the ids of the same rows in JSON Lines; arguments as in `PromptFile`.

    Raises:
        ValueError: naming the config key, and the row (counted from 1) where there is one.
    """
    return PromptFile(
        read=read_parquet,
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


def read_parquet(key: str, path: str, answer_column: str | None) -> Table:
    """Read the rows of a parquet file as plain Python values.

    A column has one type there, so a number's spelling is the type's: store golds as texts to keep theirs.

    Args:
        key: config key that named the file, for errors.
        path: the file; a relative one starts at the current folder.
        answer_column: column of the gold.

    Raises:
        ValueError: the extra is not installed, or no such parquet file.
    """
    try:
        from datasets import Dataset
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"data=parquet needs an extra: pip install 'asynctensorrlhf[datasets]' ({error})") from error
    try:
        # Not Dataset.from_parquet, which leaves a copy in a cache; Dataset decodes its own JSON cells.
        with ParquetFile(path) as file:
            values = Dataset(file.read()).to_list()
    except OSError as error:
        raise unreadable(key, path, error) from error
    except ArrowInvalid as error:
        raise ValueError(f"{key} must name a parquet file, got {path!r}: {error}") from error
    return Table(key, path, [_raw_row(f"{path}, row {n}", row, answer_column) for n, row in enumerate(values, start=1)])


def _raw_row(place: str, row: dict[str, Any], answer_column: str | None) -> RawRow:
    columns = {name: without_nulls(value) for name, value in row.items()}
    return RawRow(place, columns, None if answer_column is None else columns.get(answer_column))
