"""Joins the two sides of a run: the one place that knows all parts.

Knows which object goes into which; does not run any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed
from omegaconf import DictConfig

from asynctensorrlhf.composition.devices import rollout_device, thread_counts, trainer_device
from asynctensorrlhf.composition.resume import ResumePoint, describe_run, restore
from asynctensorrlhf.composition.rollout_side import RolloutSide, build_rollout_side
from asynctensorrlhf.composition.sources import Sources
from asynctensorrlhf.composition.training_side import TrainingSide, build_training_side
from asynctensorrlhf.orchestrator.orchestrator import Orchestrator
from asynctensorrlhf.orchestrator.prompt_queue import PromptQueue
from asynctensorrlhf.orchestrator.version_manager import VersionManager
from asynctensorrlhf.telemetry.telemetry import Telemetry
from asynctensorrlhf.trainer.checkpoint import remove_old_checkpoints, save_checkpoint
from asynctensorrlhf.trainer.evaluate import Evaluator
from asynctensorrlhf.trainer.mismatch import MismatchProbe
from asynctensorrlhf.trainer.progress import Progress
from asynctensorrlhf.trainer.trainer import TrainerWorker
from asynctensorrlhf.weights.weight_store import WeightStore


@dataclass(frozen=True)
class Parts:
    """A run that is ready to start.

    Attributes:
        orchestrator: owner of its threads.
        trainer: the loop in the main thread.
        progress: what it has done.
        report: the buffer's counts.
        evaluator: held-out accuracy; None without a held-out set.
        machine: devices and thread counts.
        export: write the model to a folder, in Hugging Face layout.
    """

    orchestrator: Orchestrator
    trainer: TrainerWorker
    progress: Progress
    report: Callable[[], dict[str, object]]
    evaluator: Evaluator | None
    machine: dict[str, object]
    export: Callable[[Path], None]


def build(cfg: DictConfig, sources: Sources, resume: ResumePoint | None, run_dir: Path, telemetry: Telemetry) -> Parts:
    """Load and join everything; all models are made here, in the main thread, before any other thread starts."""
    set_seed(cfg.seed)
    device = trainer_device(cfg.trainer.device)
    rollouts = rollout_device(cfg.rollout.device, device)
    threads = thread_counts(cfg.runtime.trainer_threads, cfg.runtime.rollout_threads, cfg.rollout.num_workers)
    torch.set_num_threads(threads.trainer)
    machine: dict[str, object] = {
        "trainer_device": str(device),
        "rollout_device": str(rollouts),
        "trainer_threads": threads.trainer,
        "rollout_threads": threads.rollout,
    }
    telemetry.note(", ".join(f"{name} {value}" for name, value in machine.items()))
    training = build_training_side(cfg, sources, device, resume.path if resume is not None else None)
    progress = Progress()
    versions = VersionManager(resume.state["policy_version"] if resume is not None else 0)
    prompts = PromptQueue(sources.data.train, **(resume.state["prompts"] if resume is not None else {}))
    weights = WeightStore(
        training.policy.named_tensors(), policy_version=versions.current, num_kept=_num_snapshots(cfg)
    )
    rollout = build_rollout_side(cfg, sources, training, prompts, weights, rollouts)
    if resume is not None:
        restore(resume, rollout.buffer, training, progress)
    rollout.buffer.limit_admissions(prompts.num_available)

    trainer, export = _trainer(cfg, sources, training, rollout, versions, weights, progress, run_dir, telemetry)
    orchestrator = Orchestrator(
        buffer=rollout.buffer,
        workers=rollout.workers,
        trainer=trainer,
        mode=cfg.trainer.mode,
        versions=versions,
        weight_sync_fn=lambda version: weights.publish(training.policy.named_tensors(), policy_version=version),
        prepare_rollout=partial(torch.set_num_threads, threads.rollout),
        prepare_trainer=partial(torch.set_num_threads, threads.trainer),
    )
    return Parts(orchestrator, trainer, progress, rollout.buffer.report, rollout.evaluator, machine, export)


def _trainer(
    cfg: DictConfig,
    sources: Sources,
    training: TrainingSide,
    rollout: RolloutSide,
    versions: VersionManager,
    weights: WeightStore,
    progress: Progress,
    run_dir: Path,
    telemetry: Telemetry,
) -> tuple[TrainerWorker, Callable[[Path], None]]:
    """The training loop, and the export of its model."""
    export = partial(save_model, training, sources)
    save = partial(
        save_run,
        run_dir / "checkpoints",
        keep=cfg.trainer.keep_checkpoints,
        export=export,
        training=training,
        describe=partial(describe_run, sources, rollout, training, progress, telemetry.run_id),
    )
    trainer = TrainerWorker(
        buffer=rollout.buffer,
        take=rollout.buffer.take,
        publish=versions.bump,
        versions=versions,
        update=training.update,
        progress=progress,
        telemetry=telemetry,
        save=save,
        evaluator=rollout.evaluator,
        num_steps=cfg.trainer.num_steps,
        groups_per_step=cfg.trainer.groups_per_step,
        partial_batch=cfg.trainer.partial_batch,
        overlong=cfg.trainer.overlong,
        probe=_probe(cfg, training, weights),
        checkpoint_every=cfg.trainer.checkpoint_every,
        eval_every=cfg.trainer.eval_every,
    )
    return trainer, export


def _num_snapshots(cfg: DictConfig) -> int:
    """Versions whose weights are kept: those that trained samples may come from."""
    max_staleness = cfg.buffer.max_staleness if "max_staleness" in cfg.buffer else 0
    return 1 if cfg.trainer.mismatch_every is None or cfg.trainer.mode == "sync" else 1 + max_staleness


def _probe(cfg: DictConfig, training: TrainingSide, weights: WeightStore) -> MismatchProbe | None:
    if cfg.trainer.mismatch_every is None:
        return None
    return MismatchProbe(
        policy=training.policy,
        snapshot_of=weights.of_version,
        every=cfg.trainer.mismatch_every,
        max_tokens=cfg.trainer.micro_batch_tokens,
        device=training.device,
    )


def save_model(training: TrainingSide, sources: Sources, folder: Path) -> None:
    """Model (float32) and tokenizer, so that `from_pretrained` loads the folder."""
    training.model.save_pretrained(folder)
    if training.policy.value_head is not None:
        training.policy.value_head.save(folder)
    sources.tokenizer.save_pretrained(folder)


def save_run(
    folder: Path,
    step: int,
    *,
    keep: int | None,
    export: Callable[[Path], None],
    training: TrainingSide,
    describe: Callable[[], dict[str, object]],
) -> None:
    """Write checkpoint `step`, then remove the oldest ones."""
    save_checkpoint(
        folder,
        step=step,
        save_model=export,
        optimizer=training.optimizer.state_dict(),
        state=describe(),
    )
    remove_old_checkpoints(folder, keep=keep)
