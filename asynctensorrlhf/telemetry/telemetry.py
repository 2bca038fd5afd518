"""Everything a run tells people, from one object.

Knows where each piece of news goes (files, W&B, terminal); does not know how the news was made.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from asynctensorrlhf.telemetry.console import open_console
from asynctensorrlhf.telemetry.health import Health
from asynctensorrlhf.telemetry.masking import masked
from asynctensorrlhf.telemetry.metrics_log import MetricsLog
from asynctensorrlhf.telemetry.samples_log import Decode, SamplesLog
from asynctensorrlhf.telemetry.summary import write_json
from asynctensorrlhf.telemetry.wandb_sink import WandbSink, resolve_mode, start_run
from asynctensorrlhf.types import SampleGroup, StepReport

_MOST_WARNINGS = 100
_SIGINT_EXIT_CODE = 130


class Telemetry:
    """The one logger of a run; used by one thread.

    After the start no sink can stop the run: the first failure of each is a warning, later ones are silent,
    and the sink is tried again at every step (a disk may be freed). Steps are counted from 1: the row of step
    n tells of the n-th step of the whole run, resumed parts included.

    Args:
        folder: the run's folder, which exists; `metrics.jsonl` and `samples.jsonl` in it are appended to.
        config: the composed config as plain resolved data; secrets in it are masked.
        num_steps: the last step of the run.
        decode: (prompts, completions) as ids -> (prompt text, completion text) per sample.
        run_id: W&B id to go on with (a resume in the same folder); None = a new one.
        sweep: name of the sweep's folder, which is the W&B group, and the job's number; None outside a sweep.
        mode: auto, online, offline or disabled (W&B).
        project: W&B project.
        name: W&B name; None = the folder's name.
        samples: samples written to `samples.jsonl` per step; None = every trained one.
        print_every: steps between lines when stdout is no terminal.
        health_window: steps over which a run that cannot learn is noticed.

    Raises:
        ValueError: `mode` is unknown, or online without a key.
        OSError: a file in `folder` can't be opened.

    Example:
        >>> with Telemetry(folder=run, ..., mode="offline") as telemetry:  # doctest: +SKIP
        ...     telemetry.log(report)  # leaving by an exception marks the run as failed
    """

    def __init__(
        self,
        *,
        folder: Path,
        config: Mapping[str, Any],
        num_steps: int,
        decode: Decode,
        run_id: str | None,
        sweep: tuple[str, int] | None,
        mode: str,
        project: str,
        name: str | None,
        samples: int | None,
        print_every: int,
        health_window: int,
    ) -> None:
        wandb_mode = resolve_mode(mode)
        self.run_id = run_id or secrets.token_hex(4)
        self.warnings: deque[str] = deque(maxlen=_MOST_WARNINGS)
        self._folder = folder
        self._failed: set[str] = set()
        self._is_finished = False
        self._metrics = MetricsLog(folder / "metrics.jsonl")
        self._samples = SamplesLog(folder / "samples.jsonl", decode=decode, per_step=samples)
        self._health = Health(window=health_window)
        self._console = open_console(num_steps=num_steps, print_every=print_every)
        identity = {"project": project, "name": name or folder.resolve().name, "id": self.run_id}
        if run_id is not None:
            identity["resume"] = "allow"
        settings = {**identity, **_grouping(masked(config), sweep)}
        run = start_run(mode=wandb_mode, folder=folder, settings=settings, note=self.note, warn=self.warn)
        self._wandb = None if run is None else WandbSink(run)
        self._attempt_wandb(WandbSink.define_step)

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(_exit_code(error))

    def log(self, report: StepReport) -> None:
        """Tell of a finished step: a row in `metrics.jsonl` and W&B, progress, warnings about its health."""
        metrics = {"policy_version": float(report.policy_version), **report.metrics}
        self._attempt("metrics.jsonl", lambda: self._metrics.append(report))
        self._attempt_wandb(lambda wandb: wandb.log(report.step, metrics))
        self._attempt("the terminal", lambda: self._console.update(report))
        for text in self._health.check(report):
            self.warn(text)

    def log_samples(self, step: int, groups: Sequence[SampleGroup], trained_version: int) -> None:
        """Write the groups a step trained to `samples.jsonl`.

        Args:
            step: the step.
            groups: what it trained.
            trained_version: policy version the trainer held when it took them.
        """
        self._attempt("samples.jsonl", lambda: self._samples.append(step, groups, trained_version))

    def note(self, text: str) -> None:
        """A line for people."""
        self._attempt("the terminal", lambda: self._console.note(text))

    def warn(self, text: str) -> None:
        """A line about something that is wrong; the last 100 are kept in `warnings`."""
        self.warnings.append(text)
        self._attempt("the terminal", lambda: self._console.warn(text))

    def summary(self, data: Mapping[str, Any]) -> None:
        """Write `summary.json`, at once and whole, and W&B's summary."""
        self._attempt("summary.json", lambda: write_json(self._folder / "summary.json", data))
        self._attempt_wandb(lambda wandb: wandb.summary(data))

    def finish(self, exit_code: int) -> None:
        """End every sink, W&B as finished (0) or failed; only the first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        self._attempt("the terminal", self._console.close)
        for text in self._health.closing():
            self.warn(text)
        if (verdict := self._health.verdict()) is not None:
            self.note(verdict)
        self._attempt_wandb(lambda wandb: wandb.finish(exit_code))
        self._metrics.close()
        self._samples.close()

    def _attempt_wandb(self, act: Callable[[WandbSink], None]) -> None:
        if (wandb := self._wandb) is not None:
            self._attempt("W&B", lambda: act(wandb))

    def _attempt(self, sink: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - whatever a sink raises is worth one warning, never the run
            if sink not in self._failed:
                self._failed.add(sink)
                self.warn(f"{sink} failed, the run goes on: {type(error).__name__}: {error}")


def _grouping(config: dict[str, Any], sweep: tuple[str, int] | None) -> dict[str, Any]:
    if sweep is None:
        return {"config": config}
    folder, job = sweep
    return {"config": {**config, "sweep": {"folder": folder, "job": job}}, "group": folder}


def _exit_code(error: BaseException | None) -> int:
    """The error's own `exit_code` where it has one (a stop by a signal does)."""
    if error is None:
        return 0
    usual = _SIGINT_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1
    return int(getattr(error, "exit_code", usual))
