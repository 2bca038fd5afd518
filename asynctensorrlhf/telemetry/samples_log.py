"""`samples.jsonl`: what was trained, sample by sample, with the policy versions that wrote it.

Knows the layout of a row; does not know how ids become text (a callable does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asynctensorrlhf.telemetry.json_lines import JsonLines
from asynctensorrlhf.types import SampleGroup

Ids = Sequence[int]
Decode = Callable[[Sequence[Ids], Sequence[Ids]], Sequence[tuple[str, str]]]


class SamplesLog:
    """Rows of trained samples.

    Text is for people; `completion_ids` say what was sampled. Written in the caller's thread (256 samples of
    3 tokens cost about 3 ms of one core), so that a checkpoint never overtakes the rows of its steps.

    Args:
        path: the file.
        decode: (prompts, completions) as ids, one each per sample -> (prompt text, completion text) of each.
        per_step: samples written per step, spread over the groups; None = all.
    """

    def __init__(self, path: Path, *, decode: Decode, per_step: int | None) -> None:
        self._lines = JsonLines(path)
        self._decode = decode
        self._per_step = per_step

    def append(self, step: int, groups: Sequence[SampleGroup], trained_version: int) -> None:
        """Write the rows of one step.

        Args:
            step: the trainer step that consumed the groups.
            groups: what it trained.
            trained_version: policy version the trainer held when it consumed them.

        Raises:
            OSError: the disk refused; the file is as it was before.
        """
        rows = [row for group in groups for row in _rows(group)]
        if self._per_step is not None:
            rows = sorted(rows, key=_sample_index)[: self._per_step]  # stable: one sample of each group first
        texts = self._decode([row["prompt"] for row in rows], [row["completion_ids"] for row in rows])
        for row, (prompt, completion) in zip(rows, texts, strict=True):
            staleness = trained_version - row["min_policy_version"]
            row |= {"prompt": prompt, "completion": completion, "staleness": staleness}
            row |= {"step": step, "trained_version": trained_version}
        self._lines.append({name: row[name] for name in COLUMNS} for row in rows)

    def close(self) -> None:
        """No more rows."""
        self._lines.close()


COLUMNS = (
    "step",
    "group_id",
    "sample_index",
    "prompt",
    "completion",
    "completion_ids",
    "reward",
    "min_policy_version",
    "max_policy_version",
    "trained_version",
    "staleness",
    "finish_reason",
)


def _rows(group: SampleGroup) -> Iterator[dict[str, Any]]:
    prompt_ids, rewards = group.prompt.prompt_ids.tolist(), group.rewards.tolist()
    ids = _lists([sample.completion_ids for sample in group.samples])
    versions = _lists([sample.token_versions for sample in group.samples])
    columns = zip(group.samples, rewards, ids, versions, strict=True)
    for sample, reward, sample_ids, sample_versions in columns:
        yield {
            "group_id": group.prompt.group_id,
            "sample_index": sample.sample_index,
            "prompt": prompt_ids,
            "completion_ids": sample_ids,
            "reward": reward,
            "min_policy_version": min(sample_versions),
            "max_policy_version": max(sample_versions),
            "finish_reason": sample.finish_reason,
        }


def _lists(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The tensors as lists, by one copy from their device for the whole group."""
    flat = iter(torch.cat(list(tensors)).tolist())
    return [list(islice(flat, len(tensor))) for tensor in tensors]


def _sample_index(row: dict[str, Any]) -> int:
    return int(row["sample_index"])
