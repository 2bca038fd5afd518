"""Going on from a checkpoint: which one, what it says of the run, and what lies past it.

Knows the state that a run saves; does not know how it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asynctensorrlhf.buffer.ledger import TicketLedger
from asynctensorrlhf.buffer.replay_buffer import ReplayBuffer
from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.rollout_side import RolloutSide
from asynctensorrlhf.composition.sources import Sources
from asynctensorrlhf.composition.training_side import TrainingSide
from asynctensorrlhf.telemetry.rows_aside import move_rows_aside
from asynctensorrlhf.trainer.checkpoint import (
    check_checkpoint,
    newest_checkpoint,
    read_optimizer,
    read_state,
    restore_random_state,
    set_newer_aside,
)
from asynctensorrlhf.trainer.progress import Progress


@dataclass(frozen=True)
class ResumePoint:
    """A complete checkpoint and the state in it."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps that were finished."""
        return int(self.state["progress"]["num_steps"])

    @property
    def progress(self) -> Progress:
        """What was done until then."""
        progress = Progress()
        progress.load_state_dict(self.state["progress"])
        return progress

    @property
    def groups(self) -> dict[str, Any]:
        """The buffer's counts until then; outstanding prompts will be drawn again and don't count."""
        ledger = TicketLedger()
        ledger.load_state_dict(self.state["buffer"])
        return ledger.report()

    def run_id(self, run_dir: Path) -> str | None:
        """The run's identity in W&B, when it goes on in its own folder; a copy elsewhere is a new run."""
        is_same_run = self.path.resolve().is_relative_to(run_dir.resolve())
        return str(self.state["run_id"]) if is_same_run else None


def find_resume_point(setting: str | None, run_dir: Path) -> tuple[ResumePoint | None, list[str]]:
    """The checkpoint that `resume` means, and lines about those that were passed over.

    Raises:
        ConfigError: a checkpoint was named and is none, or is damaged.
    """
    if setting is None:
        return None, []
    if setting == "auto":
        path, skipped = newest_checkpoint(run_dir / "checkpoints")
    else:
        path, skipped = _named_checkpoint(Path(setting))
    return (ResumePoint(path, read_state(path)) if path is not None else None), skipped


def _named_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """A checkpoint folder, or the newest of a run's folder."""
    if (path / "checkpoints").is_dir():
        newest, skipped = newest_checkpoint(path / "checkpoints")
        if newest is None:
            raise ConfigError(f"resume={path}: holds no complete checkpoint; {'; '.join(skipped) or 'none was saved'}")
        return newest, skipped
    try:
        check_checkpoint(path)
    except ValueError as error:
        raise ConfigError(f"resume={path}: {error}") from error
    return path, []


def check_same_data(point: ResumePoint, sources: Sources) -> None:
    """Refuse to go on with other data, before anything of the run is touched.

    Raises:
        ConfigError: the data differs from what the checkpoint was trained on.
    """
    if point.state["data"] != sources.data.train.fingerprint:
        raise ConfigError(
            f"resume={point.path}: rows or order of the data (data.*, seed) differ from those of the checkpoint; "
            "resume with the same data, or start a new run with model.path=<checkpoint>"
        )


def set_aside(run_dir: Path, step: int) -> list[str]:
    """Move checkpoints and log rows past `step` to names of their own; returns a line about each."""
    # checkpoints first: if this breaks off, the next resume starts from the same step and moves the rows
    checkpoints = set_newer_aside(run_dir / "checkpoints", step)
    moved = [move_rows_aside(run_dir / name, step) for name in ("metrics.jsonl", "samples.jsonl")]
    return [
        *(f"checkpoint past step {step} moved to {path.name}" for path in checkpoints),
        *(f"rows past step {step} moved to {path.name}" for path in moved if path is not None),
    ]


def describe_run(
    sources: Sources,
    rollout: RolloutSide,
    training: TrainingSide,
    progress: Progress,
    run_id: str,
) -> dict[str, Any]:
    """Everything that a checkpoint says besides weights and moments, as plain data of one moment."""
    counts = rollout.buffer.state_dict()
    return {
        "policy_version": rollout.buffer.policy_version,
        "progress": progress.state_dict(),
        "buffer": counts,
        "prompts": rollout.prompts.state(
            outstanding_ordinals=counts["outstanding_ordinals"], num_admitted=counts["num_admitted"]
        ),
        "update": training.update.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "data": sources.data.train.fingerprint,
        "run_id": run_id,
    }


def restore(point: ResumePoint, buffer: ReplayBuffer, training: TrainingSide, progress: Progress) -> None:
    """Put counts, moments and schedule back; the weights were loaded from the checkpoint."""
    progress.load_state_dict(point.state["progress"])
    buffer.load_state_dict(point.state["buffer"])
    training.update.load_state_dict(point.state["update"])
    _restore_optimizer(training, read_optimizer(point.path), point.state["scheduler"])
    restore_random_state(point.path)


def _restore_optimizer(training: TrainingSide, moments: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Moments and place in the schedule as saved; settings, peak and length of the schedule as configured now."""
    optimizer, scheduler = training.optimizer, training.scheduler
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(moments)
    scheduler.load_state_dict(schedule | {"base_lrs": scheduler.base_lrs})
    for group, setting, peak, factor in zip(
        optimizer.param_groups, settings, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group.update(setting, lr=peak * factor(scheduler.last_epoch))
