"""What a person at the terminal sees while a run goes on.

Knows how progress looks on a terminal and in a log file; does not know what a metric means beyond its name.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, runtime_checkable

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from asynctensorrlhf.telemetry.health import WAIT_SHARE
from asynctensorrlhf.types import StepReport

_FIELDS = (
    ("reward/mean", "reward {:.3f}"),
    ("staleness/max_versions", "staleness {:.0f}"),
    ("throughput/completion_tokens_per_s", "{:,.0f} tokens/s"),
    ("loss/total", "loss {:.4f}"),
)
_WINDOW = 20  # steps behind the remaining time and the share of waiting
_REFRESH_S = 0.1


@runtime_checkable
class Console(Protocol):
    """Takes progress and lines for people.

    Raises:
        OSError, ValueError: whoever reads is gone.
    """

    def update(self, report: StepReport) -> None:
        """Show that a step is done."""
        ...

    def note(self, text: str) -> None:
        """A line for people."""
        ...

    def warn(self, text: str) -> None:
        """A line about something that is wrong."""
        ...

    def close(self) -> None:
        """Show the last step if it was not shown, and give the terminal back."""
        ...


class StatusLine:
    """Steps as one line: step of steps, time left, the main metrics (those there are), who waits for whom."""

    def __init__(self, *, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._times: deque[float] = deque(maxlen=_WINDOW + 1)
        self._waits: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def add(self, report: StepReport) -> str:
        """Take a finished step in and return its line."""
        metrics = report.metrics
        self._times.append(self._clock())
        if "time/wait_for_batch_s" in metrics and "time/step_s" in metrics:
            self._waits.append((metrics["time/wait_for_batch_s"], metrics["time/step_s"]))
        fields = [words.format(metrics[name]) for name, words in _FIELDS if name in metrics]
        progress = [f"step {report.step}/{self._num_steps}", *self._time_left(report.step)]
        return " | ".join([*progress, *fields, *self._waiting()])

    def _time_left(self, step: int) -> list[str]:
        if len(self._times) < 2:
            return []
        step_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return [f"eta {timedelta(seconds=round(step_s * max(0, self._num_steps - step)))}"]

    def _waiting(self) -> list[str]:
        step_s = sum(step_s for _, step_s in self._waits)
        if not step_s:
            return []
        share = min(1.0, sum(wait_s for wait_s, _ in self._waits) / step_s)
        waits_for_rollouts = f"trainer waits {100 * share:.0f} % for rollouts"
        return [waits_for_rollouts if share >= WAIT_SHARE else "rollouts wait for the trainer"]


class PlainConsole:
    """Lines for a file or a pipe: the first step, every `print_every`-th and the last; warnings on stderr."""

    def __init__(self, *, status: StatusLine, print_every: int) -> None:
        self._status = status
        self._print_every = print_every
        self._has_printed = False
        self._unprinted: str | None = None

    def update(self, report: StepReport) -> None:
        """Show that a step is done."""
        self._unprinted = self._status.add(report)
        if not self._has_printed or report.step % self._print_every == 0:
            self.close()
            self._has_printed = True

    def note(self, text: str) -> None:
        """A line for people, after the line of the step that came before it."""
        self.close()
        _print(text)

    def warn(self, text: str) -> None:
        """A line about something that is wrong."""
        _print(f"warning: {text}", is_warning=True)

    def close(self) -> None:
        """Show the last step if it was not shown."""
        if self._unprinted is not None:
            _print(self._unprinted)
            self._unprinted = None


class LiveConsole:
    """One line that is drawn over; notes and warnings appear above it."""

    def __init__(self, *, status: StatusLine, rich: RichConsole, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status
        self._clock = clock
        self._drawn_at = -_REFRESH_S
        # Drawn by the caller's thread: a thread of its own would wake while the trainer computes.
        self._live = Live(Text(""), console=rich, auto_refresh=False)

    def update(self, report: StepReport) -> None:
        """Show that a step is done."""
        self._live.start()  # the first time; later calls do nothing
        is_due = self._clock() - self._drawn_at >= _REFRESH_S
        self._live.update(Text(self._status.add(report)), refresh=is_due)
        if is_due:
            self._drawn_at = self._clock()

    def note(self, text: str) -> None:
        """A line for people."""
        self._live.console.print(Text(text))

    def warn(self, text: str) -> None:
        """A line about something that is wrong."""
        self._live.console.print(Text(f"warning: {text}", style="yellow"))

    def close(self) -> None:
        """Show the last step if it was not shown, and give the terminal back."""
        self._live.stop()


def open_console(*, num_steps: int, print_every: int) -> Console:
    """A live line when stdout is a terminal that can draw over itself, else plain lines."""
    status = StatusLine(num_steps=num_steps)
    if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(status=status, rich=RichConsole(file=sys.stdout, force_terminal=True))
    return PlainConsole(status=status, print_every=print_every)


def _print(text: str, *, is_warning: bool = False) -> None:
    """Print, as escapes what the stream's encoding can't show."""
    stream = sys.stderr if is_warning else sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
