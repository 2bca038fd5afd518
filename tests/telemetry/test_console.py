import io
import os
import sys

import pytest
from rich.console import Console as RichConsole

from asynctensorrlhf.telemetry.console import LiveConsole, PlainConsole, StatusLine, open_console
from asynctensorrlhf.types import StepReport

METRICS = {
    "reward/mean": 0.51249,
    "staleness/max_versions": 2.0,
    "throughput/completion_tokens_per_s": 1234.5,
    "time/wait_for_batch_s": 0.41,
    "time/step_s": 1.0,
}


class Clock:
    """Time that passes when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_line_tells_progress_time_left_metrics_and_who_waits():
    clock = Clock()
    status = StatusLine(num_steps=300, clock=clock)
    status.add(StepReport(step=9, policy_version=9, metrics=METRICS))
    clock.now = 2.0
    line = status.add(StepReport(step=10, policy_version=10, metrics=METRICS))
    expected = "step 10/300 | eta 0:09:40 | reward 0.512 | staleness 2 | 1,234 tokens/s"
    assert line == f"{expected} | trainer waits 41 % for rollouts"


def test_metrics_that_are_absent_are_left_out():
    line = StatusLine(num_steps=5).add(StepReport(step=1, policy_version=1, metrics={"loss/total": 0.5}))
    assert line == "step 1/5 | loss 0.5000"


def test_rollouts_wait_when_the_trainer_does_not():
    metrics = {"time/wait_for_batch_s": 0.05, "time/step_s": 1.0}
    line = StatusLine(num_steps=5).add(StepReport(step=1, policy_version=1, metrics=metrics))
    assert line == "step 1/5 | rollouts wait for the trainer"


def printed_steps(capsys, steps, num_steps, print_every):
    console = PlainConsole(status=StatusLine(num_steps=num_steps), print_every=print_every)
    for step in steps:
        console.update(StepReport(step=step, policy_version=step, metrics={}))
    console.close()
    return [int(line.split("/")[0].removeprefix("step ")) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("steps", "num_steps", "expected"),
    [
        (range(1, 10), 9, [1, 4, 8, 9]),
        (range(1, 9), 8, [1, 4, 8]),
        (range(6, 10), 20, [6, 8, 9]),  # resumed, then stopped early
        (range(1, 1), 8, []),
    ],
)
def test_plain_lines_show_the_first_every_nth_and_the_last_step_once(capsys, steps, num_steps, expected):
    assert printed_steps(capsys, steps, num_steps, print_every=4) == expected


def test_without_a_terminal_the_lines_are_plain_and_warnings_go_to_stderr(capsys):
    console = open_console(num_steps=3, print_every=1)
    console.update(StepReport(step=1, policy_version=1, metrics={}))
    console.note("[bold]accuracy[/bold] 0.5")
    console.warn("look")
    console.close()
    out, err = capsys.readouterr()
    assert out == "step 1/3\n[bold]accuracy[/bold] 0.5\n"
    assert err == "warning: look\n"


def test_text_the_stream_cannot_encode_is_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    open_console(num_steps=3, print_every=1).note("caf\u00e9 \U0001f600")
    assert stream.buffer.getvalue() == b"caf\\xe9 \\U0001f600\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_line_drawn_over_and_notes_above_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = open_console(num_steps=300, print_every=1)
    assert isinstance(console, LiveConsole)
    for step in range(1, 301):
        console.update(StepReport(step=step, policy_version=step, metrics={}))
    console.note("[bold] is no markup")
    console.close()
    text = sys.stdout.getvalue()
    assert all(words in text for words in ("step 1/300", "step 300/300", "[bold] is no markup"))
    assert "\x1b[2K" in text, "nothing was drawn over"
    assert sys.stdout.isatty(), "the terminal was not given back"


def test_a_fast_run_redraws_the_line_only_so_often():
    clock, screen = Clock(), Terminal()
    rich = RichConsole(file=screen, force_terminal=True, width=80)
    console = LiveConsole(status=StatusLine(num_steps=300), rich=rich, clock=clock)
    for step in range(1, 301):
        console.update(StepReport(step=step, policy_version=step, metrics={}))
    console.close()
    assert screen.getvalue().count("step ") <= 3


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setitem(os.environ, "TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(open_console(num_steps=3, print_every=1), PlainConsole)
