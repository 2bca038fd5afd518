"""One training job: load, build, evaluate, train, evaluate, summarise.

Knows the course of a run and how it may end; does not know what its parts do.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers.utils import logging as transformers_logging

from asynctensorrlhf.composition.build import Parts, build
from asynctensorrlhf.composition.dry_run import describe_dry_run
from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.resume import ResumePoint, check_same_data, find_resume_point, set_aside
from asynctensorrlhf.composition.run_folder import claim, owned
from asynctensorrlhf.composition.sources import Sources, load_sources
from asynctensorrlhf.composition.summary import headline, summarise
from asynctensorrlhf.composition.sweep import SweepJob
from asynctensorrlhf.orchestrator import stop_signals
from asynctensorrlhf.orchestrator.stop_signals import Interrupted
from asynctensorrlhf.telemetry.telemetry import Telemetry
from asynctensorrlhf.telemetry.texts import decoded_pairs
from asynctensorrlhf.telemetry.wandb_sink import resolve_mode
from asynctensorrlhf.trainer.checkpoint import complete_checkpoints
from asynctensorrlhf.trainer.evaluate import Evaluator
from asynctensorrlhf.trainer.progress import Progress


def run(cfg: DictConfig, run_dir: Path, sweep_job: SweepJob | None = None) -> dict[str, Any]:
    """Run one checked config in `run_dir` and return its summary.

    Raises:
        ConfigError: something that only loading can tell is wrong with the config.
        Interrupted: a signal asked the run to stop; checkpoint and summary are written.
        Exception: the first error of any part, with its own traceback; the summary is written.
    """
    with owned(run_dir):
        return _run(cfg, run_dir, sweep_job)


def _run(cfg: DictConfig, run_dir: Path, sweep_job: SweepJob | None) -> dict[str, Any]:
    """The job, in a folder that no other process uses."""
    stop_signals.reset()
    if not sys.stderr.isatty():
        # bars are for people who watch; in a file they are one long line
        transformers_logging.disable_progress_bar()
    check_logger(cfg.logger.mode)
    resume, notes = find_resume_point(cfg.resume, run_dir)
    sources = load_sources(cfg, resume.path if resume is not None else None)
    if resume is not None:
        check_same_data(resume, sources)
        notes.append(f"going on from {resume.path}")
    if cfg.dry_run:
        return describe_dry_run(cfg, sources)
    config = claim(run_dir, cfg, is_resumed=cfg.resume is not None)
    if cfg.resume is not None:
        notes += set_aside(run_dir, resume.step if resume is not None else 0)
    telemetry = Telemetry(
        folder=run_dir,
        config=config,
        num_steps=cfg.trainer.num_steps,
        decode=partial(decoded_pairs, sources.tokenizer),
        run_id=resume.run_id(run_dir) if resume is not None else None,
        sweep=(sweep_job.sweep_dir.name, sweep_job.number) if sweep_job is not None else None,
        **cfg.logger,
    )
    with telemetry:
        for note in [*notes, *data_notes(sources)]:
            telemetry.note(note)
        return train(cfg, sources, resume, run_dir, telemetry)


def check_logger(mode: str) -> None:
    """Refuse `logger.mode=online` without a key before anything is loaded."""
    try:
        resolve_mode(mode)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def train(
    cfg: DictConfig, sources: Sources, resume: ResumePoint | None, run_dir: Path, telemetry: Telemetry
) -> dict[str, Any]:
    """Build the parts and run them; a summary is written however it ends."""
    parts: Parts | None = None
    try:
        parts = build(cfg, sources, resume, run_dir, telemetry)
        evaluate_before(parts.evaluator, parts.progress, telemetry)
        stop_reason = train_to_the_end(parts, telemetry)
        evaluate_after(parts.evaluator, parts.progress, telemetry)
        parts.export(run_dir / "final")
    except BaseException as error:
        # also past the training itself: an evaluation that fails is no completed run
        stop_reason = "interrupted" if isinstance(error, Interrupted) else "error"
        raise
    finally:
        with stop_signals.shielded():
            summary = summarise(parts, resume, stop_reason, run_dir)
            telemetry.summary(summary)
            telemetry.note(headline(summary, complete_checkpoints(run_dir / "checkpoints")))
    return summary


def train_to_the_end(parts: Parts, telemetry: Telemetry) -> str:
    """Train; what was done is saved also when a signal or an error ends it."""
    try:
        with parts.orchestrator as orchestrator:
            stop_reason = orchestrator.train()
    except BaseException:
        try:
            with stop_signals.shielded():
                parts.trainer.save_whole_steps()
        except OSError as error:
            # the error that ended the run is the one to tell
            telemetry.warn(f"the last steps could not be saved: {error}")
        raise
    with stop_signals.shielded():
        parts.trainer.save_whole_steps()
    return stop_reason


def evaluate_before(evaluator: Evaluator | None, progress: Progress, telemetry: Telemetry) -> None:
    """Held-out accuracy of the first weights; a resumed run has it from its checkpoint."""
    if evaluator is not None and progress.accuracy_before is None:
        accuracy = evaluator()
        progress.accuracy_before, progress.greedy_before = accuracy.sampled, accuracy.greedy
        telemetry.note(f"held-out accuracy before: {accuracy.sampled:.3f} sampled, {accuracy.greedy:.3f} greedy")


def evaluate_after(evaluator: Evaluator | None, progress: Progress, telemetry: Telemetry) -> None:
    """Held-out accuracy of the last weights."""
    if evaluator is not None:
        accuracy = evaluator()
        progress.accuracy_after, progress.greedy_after = accuracy.sampled, accuracy.greedy
        telemetry.note(f"held-out accuracy after: {accuracy.sampled:.3f} sampled, {accuracy.greedy:.3f} greedy")


def data_notes(sources: Sources) -> list[str]:
    """What was read and left out at load."""
    counts = ", ".join(f"{name} {count}" for name, count in sources.data.counts.items())
    return [f"data: {counts}"] if counts else []
