"""Start, supervise, stop: one owner of the rollout threads and of the reason why a run ended.

Knows which loops there are and how the first failure ends them all; does not know what they compute. The loops do not
know the orchestrator.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Protocol, runtime_checkable

from asynctensorrlhf.interfaces import Buffer, BufferClosed
from asynctensorrlhf.orchestrator import stop_signals
from asynctensorrlhf.orchestrator.version_manager import VersionManager
from asynctensorrlhf.rollout.worker import RolloutWorker
from asynctensorrlhf.types import SampleGroup

StopReason = Literal["completed", "data_ended"]


@runtime_checkable
class Trainer(Protocol):
    """The loop of the main thread: calls `take` for groups, updates, and calls `publish` once a step."""

    def run(self, take: Callable[[int], list[SampleGroup]], publish: Callable[[], int]) -> StopReason:
        """Step to the end; raises what `take` raises."""
        ...


@runtime_checkable
class SupervisedBuffer(Buffer, Protocol):
    """A buffer that can also say whether `take` would return at once."""

    def can_take(self, num_groups: int) -> bool:
        """Whether `take` would return without waiting."""
        ...


class Orchestrator:
    """Runs rollout workers in threads beside the trainer in the calling thread.

    Loops:
        rollout worker (a thread each): admit -> generate -> score -> put; waits in `buffer.admit`.
        trainer (the calling thread): take -> update -> publish; waits in `buffer.take`.
        Both waits end by the other side, by `buffer.close`, or at the buffer's time limit.
    The first error of any thread closes the buffer with it, which wakes every wait with BufferClosed; `train` then
    raises that error itself, with the traceback of the thread where it happened. A signal does the same with
    `Interrupted`, after the step in progress.

    Args:
        buffer: joins the two sides.
        workers: their engines are closed on leaving.
        trainer: run by `train`.
        mode: `async` runs every worker in a thread; `sync` runs the first one turn by turn inside `take`.
        versions: counts publications.
        weight_sync_fn: called with the new version on every publication, before anything may be admitted at it;
            when it raises, the version stays and the run ends.
        prepare_rollout: called in a thread before it generates (torch's thread count belongs to a thread).
        prepare_trainer: called in the main thread before it trains.
        join_timeout_s: how long the workers may take to leave, together, once the buffer is closed.

    Example:
        >>> with Orchestrator(buffer=..., workers=..., trainer=..., ...) as run:  # doctest: +SKIP
        ...     run.train()
        'completed'
    """

    def __init__(
        self,
        *,
        buffer: SupervisedBuffer,
        workers: Sequence[RolloutWorker],
        trainer: Trainer,
        mode: Literal["async", "sync"],
        versions: VersionManager,
        weight_sync_fn: Callable[[int], None],
        prepare_rollout: Callable[[], None] = lambda: None,
        prepare_trainer: Callable[[], None] = lambda: None,
        join_timeout_s: float = 10.0,
    ) -> None:
        self.buffer, self.workers, self.trainer = buffer, workers, trainer
        self.versions, self.weight_sync_fn = versions, weight_sync_fn
        self.prepare_rollout, self.prepare_trainer = prepare_rollout, prepare_trainer
        self.join_timeout_s = join_timeout_s
        self.mode = mode
        self.threads = [
            threading.Thread(target=self._supervised, args=(worker,), name=f"rollout-{index}", daemon=True)
            for index, worker in enumerate(workers if mode == "async" else ())
        ]

    def __enter__(self) -> Orchestrator:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the buffer, wait for every thread, free the engines; an error under way is not replaced."""
        self.buffer.close(error)
        deadline_s = time.monotonic() + self.join_timeout_s
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        stuck = [thread.name for thread in self.threads if thread.is_alive()]
        if not stuck:
            for worker in self.workers:
                worker.engine.close()
        elif error is None:
            raise TimeoutError(f"{', '.join(stuck)} did not leave within {self.join_timeout_s} s of the end of the run")

    def train(self) -> StopReason:
        """Run the trainer to its end; raises the first error of any thread, or Interrupted."""
        take = self.buffer.take if self.mode == "async" else self._take_by_turns
        with stop_signals.deferred(self.buffer.close):
            try:
                return self.trainer.run(take, self.publish)
            except BufferClosed as closed:
                error = closed.__cause__ or closed
            # out here, so that the error doesn't get `closed`, which it caused, as its context: a cycle
            raise error

    def publish(self) -> int:
        """Hand out the trainer's weights under the next version; the version rises only when that succeeded."""
        self.weight_sync_fn(self.versions.current + 1)
        return self.versions.bump()

    def _take_by_turns(self, num_groups: int) -> list[SampleGroup]:
        self.prepare_rollout()
        while not self.buffer.can_take(num_groups):
            self.workers[0].turn()
        self.prepare_trainer()
        return self.buffer.take(num_groups)

    def _supervised(self, worker: RolloutWorker) -> None:
        try:
            self.prepare_rollout()
            worker.run()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run ends with it
            self.buffer.close(error)
