"""Laws 5 and 6 of the buffer under random interleavings."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from asynctensorrlhf.buffer.presets import bounded, group

COMMON = {"wait_timeout_s": 1.0}


def build(kind, groups_per_step, max_staleness, spare):
    """A buffer of each kind; `spare` is room beyond a batch, None the default."""
    capacity = None if spare is None else groups_per_step + spare
    if kind in ("block", "evict_oldest"):
        capacity = capacity or 2 * groups_per_step
        return bounded(groups_per_step=groups_per_step, capacity=capacity, when_full=kind, **COMMON)
    return group(
        groups_per_step=groups_per_step,
        capacity=capacity,
        max_staleness=max_staleness,
        staleness_policy="pace" if kind == "sync" else kind,
        synchronous=kind == "sync",
        filter_zero_variance=True,
        max_filtered_in_a_row=1000,
        **COMMON,
    )


class BufferMachine(RuleBasedStateMachine):
    """Rollouts and a trainer that take turns at random; engines pick weights up between admission and publication."""

    def __init__(self, kind, group_of):
        super().__init__()
        self.kind, self.group_of = kind, group_of
        self.in_flight, self.taken, self.trained = {}, [], []
        self.num_admitted, self.limit, self.version = 0, None, 0

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 2),
        spare=st.none() | st.integers(0, 4),
    )
    def start(self, groups_per_step, max_staleness, spare):
        self.groups_per_step = groups_per_step
        self.max_staleness = 0 if self.kind == "sync" else max_staleness
        self.buffer = build(self.kind, groups_per_step, max_staleness, spare)

    @rule(count=st.integers(1, 8))
    def admit(self, count):
        for _ in range(count):
            ticket = self.buffer.admit(wait=False)
            if ticket is not None:
                assert ticket.ordinal == self.num_admitted
                assert ticket.policy_version == self.version
                self.num_admitted += 1
                self.in_flight[ticket] = None

    @precondition(lambda self: None in self.in_flight.values())
    @rule()
    def decode(self):
        """The first token of a ticket fixes its oldest version."""
        for ticket, version in self.in_flight.items():
            self.in_flight[ticket] = self.version if version is None else version

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), num_without_signal=st.integers(0, 1))
    def put(self, data, num_without_signal):
        finished = data.draw(st.lists(st.sampled_from(list(self.in_flight)), min_size=1, unique=True))
        for index, ticket in enumerate(finished):
            version = self.in_flight.pop(ticket)
            version = self.version if version is None else version
            rewards = (0.5, 0.5) if index < num_without_signal else (0.25, 1.5)
            self.buffer.put(self.group_of(ticket, version=version, rewards=rewards))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def drop(self, data):
        ticket = data.draw(st.sampled_from(list(self.in_flight)))
        del self.in_flight[ticket]
        self.buffer.drop(ticket, "rollout_failed")

    @precondition(lambda self: not self.taken and self.buffer.can_take(self.groups_per_step))
    @rule()
    def take(self):
        groups = self.buffer.take(self.groups_per_step)
        assert len(groups) == self.groups_per_step or self.limit is not None
        if self.kind in ("pace", "evict", "sync"):
            assert all(self.version - taken.min_policy_version <= self.max_staleness for taken in groups)
        self.taken = [taken.prompt.ticket.ordinal for taken in groups]

    @precondition(lambda self: self.taken)
    @rule(discard=st.booleans())
    def advance(self, discard):
        self.version += 1
        self.buffer.advance(self.version, "non_finite_update" if discard else None)
        self.trained += self.taken
        self.taken = []

    @rule(more=st.integers(0, 5))
    def end_data(self, more):
        if self.limit is None and self.num_admitted > 30:
            self.limit = self.num_admitted + more
            self.buffer.limit_admissions(self.limit)

    @invariant()
    def nothing_is_lost(self):
        counts = self.buffer.report()
        ended = counts["trained"] + sum(counts["dropped"].values())
        assert counts["drawn"] == self.num_admitted == ended + counts["held"] + counts["in_flight"]
        assert counts["in_flight"] == len(self.in_flight)

    @invariant()
    def someone_can_go_on(self):
        """Nothing in flight, nothing taken: either a batch is ready or there is room. Else both sides wait for ever."""
        if not self.in_flight and not self.taken and not self.buffer.can_take(self.groups_per_step):
            self.admit(1)
            assert self.in_flight, "deadlock"

    @invariant()
    def each_group_is_trained_once_in_order(self):
        assert len(set(self.trained)) == len(self.trained)
        if self.kind in ("pace", "evict", "sync"):
            assert self.trained == sorted(self.trained)

    @invariant()
    def synchronous_means_one_batch_a_version(self):
        counts = self.buffer.report()
        if self.kind == "sync":
            assert counts["held"] + counts["in_flight"] <= self.groups_per_step


@pytest.mark.parametrize("kind", ["pace", "evict", "sync", "block", "evict_oldest"])
def test_conservation_order_staleness_and_progress_hold_under_random_interleavings(kind, group_of):
    limits = settings(max_examples=40, stateful_step_count=60, deadline=None, database=None, derandomize=True)
    run_state_machine_as_test(lambda: BufferMachine(kind, group_of), settings=limits)
