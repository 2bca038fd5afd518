"""Who waits in the buffer and who wakes whom."""

import random
import threading

import pytest

from asynctensorrlhf.buffer.presets import bounded, versioned
from asynctensorrlhf.buffer.replay_buffer import BufferStalled
from asynctensorrlhf.interfaces import BufferClosed

NUM_WORKERS = 4


def paced(groups_per_step=2, max_staleness=0, staleness_policy="pace", wait_timeout_s=600.0):
    """Its waits outlive the patience of `Call.result`: a wake that is missing is a failure, not a delay."""
    return versioned(
        groups_per_step=groups_per_step,
        wait_timeout_s=wait_timeout_s,
        capacity=None,
        max_staleness=max_staleness,
        staleness_policy=staleness_policy,
    )


def test_take_waits_until_the_last_group_is_put(group_of, call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    tickets = [buffer.admit(wait=True) for _ in range(2)]
    taking = call(buffer.take, 2)
    until_one_more_waits()
    buffer.put(group_of(tickets[1]))
    until_one_more_waits()
    buffer.put(group_of(tickets[0]))
    assert [taken.prompt.group_id for taken in taking.result()] == [0, 1]


def test_admit_waits_until_the_version_advances(group_of, call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    for ticket in [buffer.admit(wait=True) for _ in range(2)]:
        buffer.put(group_of(ticket))
    buffer.take(2)
    admitting = call(buffer.admit, wait=True)
    until_one_more_waits()
    buffer.advance(1)
    assert admitting.result().policy_version == 1


def test_a_drop_wakes_admit(call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    tickets = [buffer.admit(wait=True) for _ in range(2)]
    admitting = call(buffer.admit, wait=True)
    until_one_more_waits()
    buffer.drop(tickets[0], "rollout_failed")
    assert admitting.result().ordinal == 2


def test_a_drop_wakes_take(group_of, call, watch):
    buffer = paced(max_staleness=1)
    until_one_more_waits = watch(buffer)
    tickets = [buffer.admit(wait=True) for _ in range(3)]
    for ticket in tickets[1:]:
        buffer.put(group_of(ticket))
    taking = call(buffer.take, 2)
    until_one_more_waits()
    buffer.drop(tickets[0], "rollout_failed")
    assert [taken.prompt.group_id for taken in taking.result()] == [1, 2]


def test_an_evicted_group_wakes_admit(group_of, call, watch):
    buffer = paced(groups_per_step=1, max_staleness=0, staleness_policy="evict")
    until_one_more_waits = watch(buffer)
    buffer.load_state_dict({"policy_version": 3, "trained": 3, "dropped": {}})
    tickets = [buffer.admit(wait=True) for _ in range(2)]
    admitting = call(buffer.admit, wait=True)
    until_one_more_waits()
    buffer.put(group_of(tickets[0], version=2))
    assert admitting.result().ordinal == 2


def test_the_end_of_the_data_wakes_take(group_of, call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    buffer.put(group_of(buffer.admit(wait=True)))
    taking = call(buffer.take, 2)
    until_one_more_waits()
    buffer.limit_admissions(1)
    assert len(taking.result()) == 1


def test_close_wakes_every_wait_with_its_error(call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    for _ in range(2):
        buffer.admit(wait=True)
    waiting = [call(buffer.admit, wait=True), call(buffer.admit, wait=True), call(buffer.take, 2)]
    for _ in waiting:
        until_one_more_waits()
    error = OSError("worker 1 died")
    buffer.close(error)
    for one in waiting:
        with pytest.raises(BufferClosed) as closed:
            one.result()
        assert closed.value.__cause__ is error


def test_a_worker_is_parked_from_the_end_of_the_data_until_close(group_of, call, watch):
    buffer = paced()
    until_one_more_waits = watch(buffer)
    buffer.limit_admissions(1)
    ticket = buffer.admit(wait=True)
    assert buffer.admit(wait=False) is None
    admitting = call(buffer.admit, wait=True)
    until_one_more_waits()
    buffer.put(group_of(ticket))
    until_one_more_waits()
    buffer.take(2)
    buffer.advance(1)
    until_one_more_waits()
    buffer.close()
    with pytest.raises(BufferClosed):
        admitting.result()


def test_a_take_that_nobody_answers_says_who_waits_for_what():
    buffer = paced(groups_per_step=2, wait_timeout_s=0.01)
    buffer.load_state_dict({"policy_version": 6, "trained": 12, "dropped": {"stale": 1}})
    buffer.admit(wait=True)
    with pytest.raises(BufferStalled) as stalled:
        buffer.take(2)
    message = str(stalled.value)
    assert message.startswith("take(2) waited 0.01 s for put, at policy version 6")
    assert "'in_flight': 1" in message
    assert "'stale': 1" in message
    assert "Ticket(ordinal=0, policy_version=6)" in message


def test_an_admit_that_nobody_answers_says_who_waits_for_what(group_of):
    buffer = paced(groups_per_step=1, wait_timeout_s=0.01)
    buffer.put(group_of(buffer.admit(wait=True)))
    with pytest.raises(BufferStalled, match=r"admit waited 0.01 s for room.*'held': 1.*none in flight"):
        buffer.admit(wait=True)


class ScriptedCondition(threading.Condition):
    """Each wait takes six seconds of a made-up clock, after the next action of a script."""

    def __init__(self, script):
        super().__init__(threading.RLock())
        self.script, self.now_s = list(script), 0.0

    def wait(self, timeout=None):
        self.script.pop(0)()
        self.now_s += 6.0


def test_the_time_limit_counts_from_the_last_version_so_that_parked_workers_outlive_many_steps(group_of, monkeypatch):
    buffer = paced(groups_per_step=1, wait_timeout_s=10.0)
    steps = [lambda version=version: buffer.advance(version) for version in (1, 2, 3)]
    clock = ScriptedCondition([*steps, buffer.close])
    monkeypatch.setattr("asynctensorrlhf.buffer.replay_buffer.time.monotonic", lambda: clock.now_s)
    buffer._changed = clock
    buffer.limit_admissions(0)
    with pytest.raises(BufferClosed):
        buffer.admit(wait=True)
    assert clock.now_s == 24.0


@pytest.mark.parametrize("wait_timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wait_without_a_time_limit_is_refused(wait_timeout_s):
    with pytest.raises(ValueError, match="wait_timeout_s must be in"):
        paced(wait_timeout_s=wait_timeout_s)


class ScriptedWorker:
    """A rollout loop over four slots; samples take a random number of steps, stragglers twenty times as many."""

    def __init__(self, buffer, group_of, newest_version, seed):
        self.buffer, self.group_of, self.newest_version = buffer, group_of, newest_version
        self.random = random.Random(seed)
        self.slots = {}

    def run(self):
        try:
            while True:
                self.turn()
        except BufferClosed:
            return

    def turn(self):
        while len(self.slots) < 4 and (ticket := self.buffer.admit(wait=not self.slots)):
            num_steps = self.random.randint(1, 5) * (20 if ticket.ordinal % 7 == 0 else 1)
            self.slots[ticket] = [num_steps, None]
        version = self.newest_version()
        for ticket, slot in list(self.slots.items()):
            slot[0] -= 1
            slot[1] = version if slot[1] is None else slot[1]
            if slot[0] == 0:
                del self.slots[ticket]
                self.finish(ticket, slot[1])

    def finish(self, ticket, version):
        if ticket.ordinal % 11 == 5:
            self.buffer.drop(ticket, "rollout_failed")
        else:
            self.buffer.put(self.group_of(ticket, version=version))


class Run:
    """Four scripted workers and a trainer loop over one buffer, for `num_steps` steps."""

    def __init__(self, buffer, group_of, call, *, groups_per_step, num_steps):
        self.buffer, self.groups_per_step, self.num_steps = buffer, groups_per_step, num_steps
        self.published = 0
        self.trained, self.staleness, self.most_outstanding = [], [], 0
        workers = [ScriptedWorker(buffer, group_of, lambda: self.published, seed) for seed in range(NUM_WORKERS)]
        self.threads = [call(worker.run) for worker in workers]
        self.train()

    def train(self):
        for version in range(self.num_steps):
            groups = self.buffer.take(self.groups_per_step)
            if not groups:
                break
            counts = self.buffer.report()
            self.most_outstanding = max(self.most_outstanding, counts["held"] + counts["in_flight"])
            self.trained += [group.prompt.ticket.ordinal for group in groups]
            self.staleness += [version - group.min_policy_version for group in groups]
            self.published = version + 1
            self.buffer.advance(version + 1)
        self.buffer.close()
        for thread in self.threads:
            thread.result()


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("staleness_policy", ["pace", "evict"])
def test_stragglers_on_four_threads_neither_hang_nor_exceed_max_staleness(
    group_of, call, max_staleness, staleness_policy
):
    buffer = paced(3, max_staleness, staleness_policy, wait_timeout_s=20.0)
    run = Run(buffer, group_of, call, groups_per_step=3, num_steps=30)
    assert len(run.trained) == 90
    assert run.trained == sorted(run.trained)
    assert max(run.staleness) <= max_staleness
    assert run.most_outstanding <= (max_staleness + (1 if staleness_policy == "pace" else 2)) * 3
    dropped = buffer.report()["dropped"]
    assert set(dropped) <= ({"rollout_failed"} if staleness_policy == "pace" else {"rollout_failed", "stale"})


def test_nothing_is_dropped_by_pacing_and_slow_prompts_are_trained(group_of, call):
    buffer = paced(groups_per_step=3, max_staleness=2, wait_timeout_s=20.0)
    run = Run(buffer, group_of, call, groups_per_step=3, num_steps=30)
    assert run.trained == [ordinal for ordinal in range(run.trained[-1] + 1) if ordinal % 11 != 5]


@pytest.mark.parametrize("when_full", ["block", "evict_oldest"])
def test_bounded_buffers_run_with_stragglers_on_four_threads(group_of, call, when_full):
    buffer = bounded(groups_per_step=3, wait_timeout_s=20.0, capacity=5, when_full=when_full)
    run = Run(buffer, group_of, call, groups_per_step=3, num_steps=30)
    assert len(run.trained) == len(set(run.trained)) == 90
    if when_full == "block":
        assert run.most_outstanding <= 5


def test_forty_prompts_in_batches_of_three_are_each_trained_once_or_counted(group_of, call):
    buffer = paced(groups_per_step=3, max_staleness=1, wait_timeout_s=20.0)
    buffer.limit_admissions(40)
    run = Run(buffer, group_of, call, groups_per_step=3, num_steps=100)
    failed = [ordinal for ordinal in range(40) if ordinal % 11 == 5]
    assert sorted(run.trained + failed) == list(range(40))
    assert buffer.report() == {
        "drawn": 40,
        "trained": 36,
        "held": 0,
        "in_flight": 0,
        "dropped": {"rollout_failed": len(failed)},
    }


def test_a_worker_that_dies_ends_the_trainers_wait_with_its_error(call):
    buffer = paced()
    first_ticket = threading.Event()

    def dying_worker():
        buffer.admit(wait=True)
        first_ticket.set()
        buffer.close(OSError("call 3 failed"))

    taking = call(buffer.take, 2)
    call(dying_worker).result()
    assert first_ticket.is_set()
    with pytest.raises(BufferClosed) as closed:
        taking.result()
    assert str(closed.value.__cause__) == "call 3 failed"


def test_a_step_longer_than_the_time_limit_does_not_fail_the_workers_that_wait_for_it(group_of, monkeypatch):
    buffer = paced(groups_per_step=1, wait_timeout_s=10.0)
    buffer.put(group_of(buffer.admit(wait=True)))
    buffer.take(1)
    clock = ScriptedCondition([lambda: None, lambda: None, lambda: None, lambda: buffer.advance(1)])
    monkeypatch.setattr("asynctensorrlhf.buffer.replay_buffer.time.monotonic", lambda: clock.now_s)
    buffer._changed = clock
    assert buffer.admit(wait=True).policy_version == 1
    assert clock.now_s == 24.0
