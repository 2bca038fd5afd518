"""Files of prompts as a run's data: the training file, the held-out file, and how they are gone through.

Knows the keys that every file format shares; does not know how a format is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asynctensorrlhf.data.order import EpochSource
from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.data.prompt_ids import LengthLimit, PromptTokenizer, check_chat_options
from asynctensorrlhf.data.rows import RowRules
from asynctensorrlhf.data.table import ReadTable, Table
from asynctensorrlhf.data.template import load_template


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """The keys of `data=jsonl` and `data=parquet`, described in their YAML files, and what the run adds.

    Attributes:
        read: reader of the format.
        tokenizer: of the model that is trained.
        seed: of the order of draws.
        eval_draws: most held-out rows used; 0: no evaluation.
        context_limit: tokens that the model's context leaves for a prompt.
    """

    read: ReadTable
    tokenizer: PromptTokenizer
    seed: int
    eval_draws: int
    context_limit: int
    path: str
    heldout_path: str | None
    prompt_column: str
    answer_column: str | None
    template: str | None
    template_file: str | None
    chat_template_kwargs: Mapping[str, Any]
    max_prompt_tokens: int | None
    too_long: str
    num_epochs: int | None
    shuffle: bool

    def load(self) -> PromptData:
        """Read, check, tokenise; held-out rows are drawn in the order of their file, whatever the seed."""
        rules = self._rules()
        table = self._table("data.path", self.path)
        rows, counts = rules.apply(table)
        self._check_chat_options_are_used(table)
        num_draws = None if self.num_epochs is None else self.num_epochs * len(rows)
        train = EpochSource(
            rows, seed=self.seed, shuffle=self.shuffle, num_draws=num_draws, answer_column=self.answer_column
        )
        if self.heldout_path is None or not self.eval_draws:
            return PromptData(train, None, counts)
        heldout_rows, heldout_counts = rules.apply(self._table("data.heldout_path", self.heldout_path))
        num_draws = min(self.eval_draws, len(heldout_rows))
        heldout = EpochSource(
            heldout_rows, seed=self.seed, shuffle=False, num_draws=num_draws, answer_column=self.answer_column
        )
        renamed = {name.replace("num_", "num_heldout_", 1): count for name, count in heldout_counts.items()}
        return PromptData(train, heldout, {**counts, **renamed})

    def _rules(self) -> RowRules:
        check_chat_options(self.chat_template_kwargs)
        limits = [limit for limit in (self.context_limit, self.max_prompt_tokens) if limit is not None]
        return RowRules(
            tokenizer=self.tokenizer,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            template=load_template(
                template=self.template, template_file=self.template_file, prompt_column=self.prompt_column
            ),
            chat_options=self.chat_template_kwargs,
            limit=LengthLimit(min(limits), self.too_long),
        )

    def _table(self, key: str, path: str) -> Table:
        return self.read(key, path, self.answer_column)

    def _check_chat_options_are_used(self, table: Table) -> None:
        has_chat = any(isinstance(row.columns.get(self.prompt_column), list) for row in table.rows)
        if self.chat_template_kwargs and not has_chat:
            raise ValueError(
                f"data.chat_template_kwargs is set, but no prompt of {table.path} is a list of chat "
                "messages: plain prompts don't go through the chat template"
            )
