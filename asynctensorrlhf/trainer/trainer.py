"""The training loop: take, update, publish, log, save.

Knows the order of these verbs and what is counted of them; does not know engines, losses or threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

from asynctensorrlhf.buffer.collate import collate
from asynctensorrlhf.interfaces import Buffer
from asynctensorrlhf.telemetry.telemetry import Telemetry
from asynctensorrlhf.trainer.evaluate import Evaluator
from asynctensorrlhf.trainer.metrics import group_metrics
from asynctensorrlhf.trainer.mismatch import MismatchProbe
from asynctensorrlhf.trainer.progress import Progress
from asynctensorrlhf.trainer.update import Update
from asynctensorrlhf.types import SampleGroup, StepReport

StopReason = Literal["completed", "data_ended"]


@runtime_checkable
class MeteredBuffer(Buffer, Protocol):
    """A buffer that reports its own numbers."""

    def metrics(self) -> dict[str, float]:
        """Numbers named `buffer/...`."""
        ...


@runtime_checkable
class Versions(Protocol):
    """Counts publications."""

    @property
    def current(self) -> int:
        """The newest."""
        ...


class Stopwatch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.start = self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed

    def total(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start


class TrainerWorker:
    """Trains on what the buffer gives.

    Consumes: groups of the buffer, `groups_per_step` at a time.
    Waits for: `take`, nothing else.
    Unblocked by: `buffer.put`, `buffer.close`, the end of the data.

    Args:
        buffer: where trained groups are accounted for.
        take: hands out the next groups; fewer than asked when the data has ended.
        publish: makes the policy's weights the next version and returns it.
        versions: the version that is being trained.
        update: optimizer updates on a batch.
        progress: counters of the run, raised here.
        telemetry: where reports go.
        save: writes a checkpoint of the state after the given step.
        evaluator: measures held-out accuracy; None without a held-out set.
        num_steps: steps of the whole run.
        groups_per_step: groups of a step.
        partial_batch: train what is left when the data ends.
        overlong: `keep` or `mask` truncated completions, or `penalty`: they are kept, their rewards were lowered.
        probe: measures what the engine reported against the weights that sampled it; None: nobody does.
        checkpoint_every: steps; None: only at the end.
        eval_every: steps; None: not during training.
    """

    def __init__(
        self,
        *,
        buffer: MeteredBuffer,
        take: Callable[[int], list[SampleGroup]],
        publish: Callable[[], int],
        versions: Versions,
        update: Update,
        progress: Progress,
        telemetry: Telemetry,
        save: Callable[[int], None],
        evaluator: Evaluator | None,
        num_steps: int,
        groups_per_step: int,
        partial_batch: bool,
        overlong: Literal["keep", "mask", "penalty"],
        probe: MismatchProbe | None,
        checkpoint_every: int | None,
        eval_every: int | None,
    ) -> None:
        self.buffer, self.take, self.publish = buffer, take, publish
        self.versions, self.update = versions, update
        self.progress, self.telemetry = progress, telemetry
        self.save, self.evaluator = save, evaluator
        self.num_steps, self.groups_per_step = num_steps, groups_per_step
        self.partial_batch, self.overlong, self.probe = partial_batch, overlong, probe
        self.checkpoint_every, self.eval_every = checkpoint_every, eval_every
        self._saved_step = progress.num_steps
        self._num_updates_before_step: int | None = None

    def run(self, take: Callable[[int], list[SampleGroup]], publish: Callable[[], int]) -> StopReason:
        """Step after step; raises what `take` raises, with the state of the last whole step intact."""
        self.take, self.publish = take, publish
        while self.progress.num_steps < self.num_steps:
            if self.step(self.groups_per_step) is None:
                return "data_ended"
            self._evaluate_if_due()
            self._save_if_due()
        return "completed"

    def step(self, batch_size: int) -> StepReport | None:
        """One step on the next `batch_size` groups; None when the data has ended before."""
        watch = Stopwatch()
        groups = self.take(batch_size)
        wait_s = watch.lap()
        if not self._is_enough(groups, batch_size):
            self.buffer.advance(self.versions.current, "data_ended")
            return None
        self._num_updates_before_step = self.update.num_updates
        step, version = self.progress.num_steps + 1, self.versions.current
        batch = collate(groups, overlong=self.overlong)
        mismatch = self.probe(batch, step) if self.probe is not None else {}
        probe_s = watch.lap()
        update = self.update(batch, step, policy_version=version)
        update_s = watch.lap()
        is_trained = update.num_skipped < update.num_updates
        self.buffer.advance(self.publish(), None if is_trained else "non_finite_update")
        times = {
            "time/wait_for_batch_s": wait_s,
            "time/mismatch_s": probe_s,
            "time/update_s": update_s,
            "time/publish_s": watch.lap(),
            "time/step_s": watch.total(),
        }
        measured = group_metrics(groups, version, watch.total()) | update.metrics | mismatch
        metrics = measured | self.buffer.metrics() | times
        report = StepReport(step=step, policy_version=version, metrics=metrics)
        self.progress.num_steps = step
        self._num_updates_before_step = None
        self.telemetry.log(report)
        if is_trained:
            self._account(groups, version)
            self.telemetry.log_samples(step, groups, version)
        self.progress.train_wall_s += watch.total()
        return report

    def _is_enough(self, groups: list[SampleGroup], batch_size: int) -> bool:
        return len(groups) == batch_size or (self.partial_batch and bool(groups))

    def _account(self, groups: list[SampleGroup], version: int) -> None:
        progress = self.progress
        progress.completion_tokens += sum(len(s.completion_ids) for group in groups for s in group.samples)
        progress.max_staleness_seen = max(
            progress.max_staleness_seen, *(version - group.min_policy_version for group in groups)
        )

    def _evaluate_if_due(self) -> None:
        progress = self.progress
        is_due = self.eval_every is not None and progress.num_steps % self.eval_every == 0
        if self.evaluator is not None and is_due and progress.num_steps < self.num_steps:
            accuracy = self.evaluator()
            self.telemetry.note(
                f"step {progress.num_steps}: held-out accuracy {accuracy.sampled:.3f} sampled, "
                f"{accuracy.greedy:.3f} greedy"
            )

    def _save_if_due(self) -> None:
        watch, step = Stopwatch(), self.progress.num_steps
        if step == self.num_steps or (self.checkpoint_every is not None and step % self.checkpoint_every == 0):
            self.save_whole_steps()
        self.progress.train_wall_s += watch.total()

    def save_whole_steps(self) -> None:
        """Write a checkpoint unless the last step has one, or one broke off after its first update: torn weights."""
        is_torn = self._num_updates_before_step not in (None, self.update.num_updates)
        if not is_torn and self.progress.num_steps > self._saved_step:
            self.save(self.progress.num_steps)
            self._saved_step = self.progress.num_steps
