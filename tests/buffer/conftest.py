"""Builders of groups, and threads whose waits can be seen."""

import threading

import pytest
import torch

from asynctensorrlhf.types import Prompt, Sample, SampleGroup

LIMIT_S = 20.0


def make_group(ticket, *, group_id=None, version=None, rewards=(0.25, 1.5), lengths=(2, 3), logprob=-0.5):
    """A group of unequal samples; every tensor says which group it belongs to."""
    group_id = ticket.ordinal if group_id is None else group_id
    version = ticket.policy_version if version is None else version
    prompt = Prompt(group_id, 100 + group_id, torch.arange(1, 3 + group_id % 3), ticket)
    samples = tuple(
        Sample(
            prompt,
            index,
            torch.arange(length) + 10 * group_id + 1,
            torch.full((length,), logprob),
            torch.full((length,), version),
            "length" if index else "stop",
        )
        for index, length in enumerate(lengths)
    )
    scores = torch.tensor(rewards, dtype=torch.float32)
    return SampleGroup(prompt, samples, scores, scores - scores.nanmean(), version, version)


@pytest.fixture(scope="session")
def group_of():
    return make_group


class Call(threading.Thread):
    """One call in a thread of its own; `result()` gives what it returned or raises what it raised."""

    def __init__(self, function, *args, **kwargs):
        super().__init__(daemon=True)
        self.work = lambda: function(*args, **kwargs)
        self.value = self.error = None
        self.start()

    def run(self):
        try:
            self.value = self.work()
        except BaseException as error:  # noqa: BLE001 - raised again by result()
            self.error = error

    def result(self):
        self.join(LIMIT_S)
        assert not self.is_alive(), "the call is still waiting"
        if self.error is not None:
            raise self.error
        return self.value


@pytest.fixture
def call():
    return Call


class WatchedCondition(threading.Condition):
    """Releases `began` each time that a thread begins to wait."""

    def __init__(self):
        super().__init__(threading.RLock())
        self.began = threading.Semaphore(0)

    def wait(self, timeout=None):
        self.began.release()
        return super().wait(timeout)


@pytest.fixture
def watch():
    """Returns a function that returns once a further thread has begun to wait in the buffer."""

    def watch_buffer(buffer):
        buffer._changed = WatchedCondition()

        def until_one_more_waits():
            assert buffer._changed.began.acquire(timeout=LIMIT_S), "nobody waits"

        return until_one_more_waits

    return watch_buffer
