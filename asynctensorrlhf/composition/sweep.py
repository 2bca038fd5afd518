"""A job's place in its sweep and what became of it: the table and `sweep.json`.

Knows summaries and exit codes; does not know how jobs run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asynctensorrlhf.composition.plan import PlannedJob

COLUMNS = ("job", "overrides", "exit", "accuracy", "steps", "seconds", "folder")
PLAIN_WIDTH = 160


@dataclass(frozen=True)
class SweepJob:
    """A job's place in its sweep: number from 0, its overrides, and the folder that holds all jobs' folders."""

    number: int
    overrides: tuple[str, ...]
    sweep_dir: Path


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        place: in the sweep; None for a single run.
        folder: of the job.
        exit_code: 0, or why it failed.
        summary: what the job returned; of a failed one, the summary.json that it left, if it left one.
        cause: its error.
    """

    place: SweepJob | None
    folder: Path
    exit_code: int
    summary: Mapping[str, Any] | None
    cause: BaseException | None = None

    @property
    def error(self) -> str | None:
        """The error's type and first line."""
        if self.cause is None:
            return None
        lines = str(self.cause).splitlines()
        return f"{type(self.cause).__name__}: {lines[0]}" if lines else type(self.cause).__name__


def summary_in(folder: Path) -> Mapping[str, Any] | None:
    """The summary that a job wrote before it failed, if it came so far."""
    path = folder / "summary.json"
    if not path.is_file():
        return None
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary if isinstance(summary, dict) else None


def report_sweep(outcomes: Sequence[Outcome], plan: Sequence[PlannedJob] | None) -> None:
    """Print the table and write `sweep.json` into the sweep's folder (the first job's, should jobs set their own).

    Planned jobs that did not get their turn are listed with the exit code null.
    """
    records = [_record(outcome) for outcome in outcomes if outcome.place is not None]
    folders = [outcome.place.sweep_dir for outcome in outcomes if outcome.place is not None]
    if not records:
        return
    planned = {job.number: list(job.overrides) for job in plan or ()}
    for record in records:
        record["overrides"] = planned.get(record["job"], record["overrides"])
    for number in sorted(set(planned) - {record["job"] for record in records}, key=str):
        records.append(_unreached(number, planned[number], folders[0]))
    (folders[0] / "sweep.json").write_text(json.dumps({"jobs": records}, indent=2) + "\n", encoding="utf-8")
    console = Console()
    (console if console.is_terminal else Console(width=PLAIN_WIDTH)).print(_table(records))


def _record(outcome: Outcome) -> dict[str, Any]:
    assert outcome.place is not None
    return {
        "job": outcome.place.number,
        "overrides": list(outcome.place.overrides),
        "folder": str(outcome.folder),
        "exit_code": outcome.exit_code,
        "error": outcome.error,
        "summary": outcome.summary,
    }


def _unreached(number: int | None, overrides: list[str], sweep_dir: Path) -> dict[str, Any]:
    folder = sweep_dir / str(number)
    return {
        "job": number,
        "overrides": overrides,
        "folder": str(folder),
        "exit_code": None,
        "error": "did not run in this process",
        "summary": summary_in(folder),
    }


def _table(records: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="sweep", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, overflow="fold")
    for record in records:
        summary = record["summary"] or {}
        accuracy = " -> ".join(_number(summary, f"accuracy_{when}", ".3f") for when in ("before", "after"))
        table.add_row(
            str(record["job"]),
            " ".join(record["overrides"]),
            "-" if record["exit_code"] is None else str(record["exit_code"]),
            accuracy,
            _number(summary, "num_steps", "d"),
            _number(summary, "train_wall_s", ".1f"),
            record["folder"],
        )
    return table


def _number(summary: Mapping[str, Any], name: str, form: str) -> str:
    value = summary.get(name)
    return "-" if value is None else format(value, form)
