"""Whole jobs in the test's own process: a command line in, exit code and files out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from asynctensorrlhf.cli import train_job
from asynctensorrlhf.composition.jobs import run_jobs

SMALL = (
    "logger.mode=disabled",
    "trainer.num_steps=4",
    "trainer.groups_per_step=4",
    "trainer.eval_draws=0",
    "rollout.group_size=4",
    "rollout.max_concurrent=8",
)


@dataclass(frozen=True)
class Run:
    """What a job left behind."""

    exit_code: int
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return rows(self.folder / "metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        return rows(self.folder / "samples.jsonl")

    @property
    def weights(self) -> dict[str, Any]:
        return load_file(self.folder / "final" / "model.safetensors")

    @property
    def losses(self) -> list[float]:
        return [row["loss/total"] for row in self.metrics]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def train(folder: Path, *overrides: str) -> Run:
    """Run the small job with these overrides, later ones winning."""
    return Run(run_jobs([*SMALL, f"output_dir={folder}", *overrides], train_job), folder)


def is_conserved(summary: dict[str, Any]) -> bool:
    groups = summary["groups"]
    return groups["drawn"] == (
        groups["trained"] + groups["held"] + groups["in_flight"] + sum(groups["dropped"].values())
    )


def assert_same_run(first: Run, second: Run) -> None:
    """Samples, losses and final weights, bit for bit."""
    assert first.samples == second.samples
    assert first.losses == second.losses
    assert first.weights.keys() == second.weights.keys()
    assert all((first.weights[name] == second.weights[name]).all() for name in first.weights)
