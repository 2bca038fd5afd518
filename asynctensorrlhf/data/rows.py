"""From the rows of a file to prompt rows: what is kept, dropped, cut, and refused.

Knows the rules that every file format shares; does not know formats or the order of draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from asynctensorrlhf.data.prompt_ids import LengthLimit, PromptTokenizer, chat_ids, plain_ids
from asynctensorrlhf.data.table import RawRow, Table, check_column, exact_answer
from asynctensorrlhf.data.template import Template
from asynctensorrlhf.types import PromptRow


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """The part of the config that turns raw rows into prompt rows.

    Attributes:
        tokenizer: of the model that is trained.
        prompt_column: a text, or a list of chat messages.
        answer_column: the gold; None: rows have none.
        template: text around plain prompts; None: the prompt alone.
        chat_options: arguments of the chat template.
        limit: the length rule, applied to the final ids.
    """

    tokenizer: PromptTokenizer
    prompt_column: str
    answer_column: str | None
    template: Template | None
    chat_options: Mapping[str, Any]
    limit: LengthLimit

    def apply(self, table: Table) -> tuple[list[PromptRow], dict[str, int]]:
        """The rows that are used, in the file's order, and counts of what happened to the others.

        Raises:
            ValueError: a missing column, a row that breaks a rule (naming its line), or nothing left.
        """
        self._check_table(table)
        filled = [row for row in table.rows if not _is_blank(row.columns.get(self.prompt_column))]
        counts = {
            "num_rows_read": len(table.rows),
            "num_blank_lines": table.num_blank_lines,
            "num_dropped_empty_prompt": len(table.rows) - len(filled),
            "num_dropped_too_long": 0,
            "num_cut": 0,
        }
        rows: list[PromptRow] = []
        names = table.column_names()
        bos = self.tokenizer.bos_token_id
        for row, ids in zip(filled, self._all_ids(filled), strict=True):
            if ids in ([], [bos]):
                counts["num_dropped_empty_prompt"] += 1
            elif (fitted := self._fit(row, ids, bos)) is None:
                counts["num_dropped_too_long"] += 1
            else:
                counts["num_cut"] += len(fitted) < len(ids)
                rows.append(self._prompt_row(row, fitted, names))
        if not rows:
            raise ValueError(
                f"{table.key}: no prompt of {table.path} is left: {counts['num_rows_read']} rows read, "
                f"{counts['num_dropped_empty_prompt']} dropped with an empty prompt, "
                f"{counts['num_dropped_too_long']} with more than {self.limit.num_tokens} tokens"
            )
        return rows, {**counts, "num_rows": len(rows)}

    def _check_table(self, table: Table) -> None:
        if not table.rows:
            raise ValueError(f"{table.key}: {table.path} holds no rows")
        check_column(table, key="data.prompt_column", name=self.prompt_column)
        if self.answer_column is not None:
            hint = "; null when no reward reads one"
            check_column(table, key="data.answer_column", name=self.answer_column, hint=hint)

    def _all_ids(self, rows: list[RawRow]) -> list[list[int]]:
        """Ids of each prompt; all plain ones in one call, because a call costs more than a row."""
        prompts = [self._prompt(row) for row in rows]
        plain = iter(plain_ids([prompt for prompt in prompts if isinstance(prompt, str)], self.tokenizer))
        return [
            next(plain) if isinstance(prompt, str) else self._chat_ids(prompt, row)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def _prompt(self, row: RawRow) -> str | list[Any]:
        """The filled-in text, or the messages."""
        prompt = row.columns[self.prompt_column]
        if isinstance(prompt, str):
            return self.template.fill(prompt) if self.template else prompt
        if not (isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)):
            raise ValueError(
                f"data.prompt_column: {row.place}: {self.prompt_column!r} must be a text or a list of chat "
                f"messages, got {prompt!r}"
            )
        if self.template:
            raise ValueError(f"data.template is for plain prompts, but {row.place} holds chat messages")
        return prompt

    def _chat_ids(self, messages: list[Any], row: RawRow) -> list[int]:
        try:
            return chat_ids(messages, self.tokenizer, self.chat_options)
        except (TemplateError, ValueError, TypeError) as error:
            raise ValueError(f"data.prompt_column: {row.place}: {error}") from error

    def _fit(self, row: RawRow, ids: list[int], bos: int | None) -> list[int] | None:
        try:
            return self.limit.fit(ids, bos)
        except ValueError as error:
            raise ValueError(f"data.too_long: {row.place}: {error}") from error

    def _prompt_row(self, row: RawRow, ids: list[int], names: list[str]) -> PromptRow:
        """The row with every column of the file: one that it lacks is None, as a columnar file has it."""
        columns = {name: row.columns.get(name) for name in names}
        if self.answer_column is not None:
            try:
                columns[self.answer_column] = exact_answer(row.answer)
            except ValueError as error:
                raise ValueError(f"data.answer_column: {row.place}: {error}") from error
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return PromptRow(torch.tensor(ids), text, columns)


def _is_blank(prompt: Any) -> bool:
    """Whether a prompt says nothing: no text, or messages that hold nothing but roles."""
    if isinstance(prompt, str):
        return not prompt.strip()
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        said = (value for message in prompt for key, value in message.items() if key != "role")
        return not any(value.strip() if isinstance(value, str) else value for value in said)
    return prompt is None
