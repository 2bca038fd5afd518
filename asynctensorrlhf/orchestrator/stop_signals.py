"""SIGINT and SIGTERM: the first asks the run to stop, the second ends the process at once.

Knows signals and exit codes; does not know what a run does to stop.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A stop was asked for by a signal; `exit_code` is 128 + its number (130 SIGINT, 143 SIGTERM)."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


class _State:
    """What the handler reads: it may run between any two instructions, so it takes no lock."""

    received: int | None = None
    wake_fd: int | None = None
    is_shielded = False


def install() -> None:
    """Handle SIGINT and SIGTERM from now on; a no-op outside the main thread, where handlers can't be set."""
    if threading.current_thread() is threading.main_thread():
        reset()
        for signum in SIGNALS:
            signal.signal(signum, _handle)


def reset() -> None:
    """Forget an earlier signal: a job of a sweep starts afresh."""
    _State.received = None


def check() -> None:
    """Raise Interrupted when a signal has come; for long loops of the main thread."""
    if _State.received is not None:
        raise Interrupted(_State.received)


@contextmanager
def deferred(on_signal: Callable[[Interrupted], None]) -> Iterator[None]:
    """While inside, the first signal does not raise but calls `on_signal`, from a thread of its own.

    A handler must not take locks that the interrupted code may hold; a thread that reads from a pipe may.
    """
    read_fd, write_fd = os.pipe()

    def watch() -> None:
        if os.read(read_fd, 1) == b"s" and _State.received is not None:
            on_signal(Interrupted(_State.received))

    watcher = threading.Thread(target=watch, name="stop-signals", daemon=True)
    watcher.start()
    _State.wake_fd = write_fd
    try:
        check()
        yield
    finally:
        _State.wake_fd = None
        os.write(write_fd, b"e")
        watcher.join(timeout=10)
        os.close(read_fd)
        os.close(write_fd)


@contextmanager
def shielded() -> Iterator[None]:
    """While inside, the first signal neither raises nor wakes anyone: what is saved here is saved whole.

    A later `check` raises it.
    """
    _State.is_shielded = True
    try:
        yield
    finally:
        _State.is_shielded = False


def _handle(signum: int, _: FrameType | None) -> None:
    if _State.received is not None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(128 + signum)
    _State.received = signum
    if _State.is_shielded:
        return
    if _State.wake_fd is None:
        raise Interrupted(signum)
    os.write(_State.wake_fd, b"s")
