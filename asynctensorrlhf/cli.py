"""The command line: `atrlhf <command> ...`.

Knows the names of the commands; what one does, and what that needs, is imported only when it is asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from asynctensorrlhf.composition.sweep import SweepJob

EXIT_BAD_COMMAND = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the arguments after the program's name; None: those of this process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        sys.stdout.write(_overview())
        return 0
    if command == "--version":
        sys.stdout.write(f"atrlhf {_version()}\n")
        return 0
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"must be one of {', '.join(COMMANDS)}"
        sys.stderr.write(f"atrlhf {command}: unknown command; {hint}\n")
        return EXIT_BAD_COMMAND
    # Code of the user's own (rewards, data, losses) lies where the command was typed.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return COMMANDS[command][1](rest)


def train(argv: Sequence[str]) -> int:
    """Compose, check and run one job or a sweep."""
    from asynctensorrlhf.orchestrator import stop_signals

    # before the imports that take seconds: a signal during them has its exit code too
    stop_signals.install()
    try:
        from asynctensorrlhf.composition.jobs import run_jobs

        code = run_jobs(argv, train_job)
    except stop_signals.Interrupted as stop:
        code = stop.exit_code
    if any(thread.name.startswith("rollout-") for thread in threading.enumerate()):
        # an engine that never returns: the interpreter's own way out would wait for it or crash under it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def train_job(cfg: DictConfig, run_dir: Path, sweep_job: SweepJob | None) -> dict[str, Any]:
    """One job; what it needs is heavy and imported only when every job has been checked."""
    from asynctensorrlhf.train import run

    return run(cfg, run_dir, sweep_job)


def bench(argv: Sequence[str]) -> int:
    """Measure something of this machine."""
    from asynctensorrlhf.bench.command import run

    return run(argv)


COMMANDS: dict[str, tuple[str, Callable[[Sequence[str]], int]]] = {
    "train": ("make a model better: one run, or a sweep with -m", train),
    "bench": ("measure this machine: a table, and a file of the figures", bench),
}


def _overview() -> str:
    lines = [f"  {name:<10}{purpose}" for name, (purpose, _) in COMMANDS.items()]
    return "\n".join(
        (
            "atrlhf: asynchronous reinforcement learning for language models",
            "",
            "usage: atrlhf <command> ...",
            "",
            *lines,
            "",
            "`atrlhf <command> --help` says more; `atrlhf --version` prints the version.",
            "",
        )
    )


def _version() -> str:
    from asynctensorrlhf import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
