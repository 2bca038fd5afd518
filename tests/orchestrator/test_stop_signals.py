"""Signals are sent to real processes: a handler in the test process would end the tests."""

import signal
import subprocess
import sys
import textwrap

import pytest

SETUP = """
import os, signal, sys, threading
from asynctensorrlhf.orchestrator import stop_signals
from asynctensorrlhf.orchestrator.stop_signals import Interrupted
stop_signals.install()
"""


def run(code):
    script = SETUP + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_raises_where_nothing_is_under_way(signum):
    result = run(f"""
        try:
            os.kill(os.getpid(), {int(signum)})
            threading.Event().wait(30)
        except Interrupted as stop:
            sys.exit(stop.exit_code)
        """)
    assert result.returncode == 128 + signum, result.stderr


def test_a_deferred_signal_wakes_a_wait_without_raising_in_it():
    result = run("""
        woken = threading.Event()
        codes = []
        with stop_signals.deferred(lambda stop: (codes.append(stop.exit_code), woken.set())):
            os.kill(os.getpid(), signal.SIGTERM)
            assert woken.wait(30)
        print(codes, [thread.name for thread in threading.enumerate()])
        """)
    assert result.stdout == "[143] ['MainThread']\n", result.stderr


def test_the_second_signal_leaves_at_once_even_from_a_wait():
    result = run("""
        with stop_signals.deferred(lambda stop: os.kill(os.getpid(), signal.SIGTERM)):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(30)
        sys.exit(7)
        """)
    assert result.returncode == 143, result.stderr


def test_check_raises_only_after_a_signal_and_reset_forgets_it():
    result = run("""
        stop_signals.check()
        with stop_signals.deferred(lambda stop: None):
            os.kill(os.getpid(), signal.SIGINT)
            try:
                stop_signals.check()
            except Interrupted:
                stop_signals.reset()
        stop_signals.check()
        """)
    assert result.returncode == 0, result.stderr


def test_a_shielded_signal_waits_for_a_check():
    result = run("""
        with stop_signals.shielded():
            os.kill(os.getpid(), signal.SIGTERM)
            print("saved", flush=True)
        try:
            stop_signals.check()
        except Interrupted as stop:
            sys.exit(stop.exit_code)
        """)
    assert (result.stdout, result.returncode) == ("saved\n", 143), result.stderr


def test_the_second_signal_leaves_at_once_even_from_behind_a_shield():
    result = run("""
        with stop_signals.shielded():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            print("still here", flush=True)
        """)
    assert (result.stdout, result.returncode) == ("", 130), result.stderr
