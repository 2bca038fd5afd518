"""The buffer between rollout threads and the trainer: who may go on, who waits, and who wakes whom.

Knows threads, limits and time limits; does not know how groups are made or what they are trained for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asynctensorrlhf.buffer.ledger import TicketLedger, TicketRecord, TicketState
from asynctensorrlhf.buffer.ownership import own_group
from asynctensorrlhf.buffer.staleness import is_stale
from asynctensorrlhf.buffer.strategies import Eviction, Filter, Order, non_finite_logprobs
from asynctensorrlhf.interfaces import BufferClosed
from asynctensorrlhf.types import SampleGroup, Ticket


class BufferStalled(TimeoutError):
    """A wait in the buffer passed its time limit; the message says who waited for whom and what is outstanding."""


class ReplayBuffer:
    """Tickets out, groups in, batches out. Thread-safe; one trainer, any number of rollout threads.

    A ticket goes in_flight -> held -> taken -> trained, and may be dropped for a counted reason before it is trained.
    At any time: drawn = trained + held + in flight + dropped.

    Example, with two groups a step and `max_outstanding` 4 (pace, `max_staleness` 1):

        ticket  admitted at  put   taken at  staleness
        0       0            2nd   0         0
        1       0            1st   0         0          waits for ticket 0: admission order
        2       0            3rd   1         1          put before version 1: exactly at the limit
        3       0            4th   1         1
        4       -            -     -         -          four are outstanding: not before `advance(1)`

    Who waits:
        `admit(wait=True)` for room; woken by `advance`, `drop`, a put that is filtered or evicts, `close`. Once the
            data has ended there will be no room: the worker stays parked until `close`.
        `take` for enough groups in order; woken by `put`, `drop`, `limit_admissions`, `close`.
        Nothing else waits. `put` least of all: whoever puts may hold the straggler that everyone waits for.
    A wait longer than `wait_timeout_s` since it began, or since the last `advance`, raises BufferStalled; while groups
    are taken the trainer is at work, and `admit` goes on waiting.

    Args:
        order: which held groups may be taken, next first.
        max_outstanding: flow control: most tickets in flight, held and taken together; None = no limit, then the
            engines' slots bound what is in flight and the eviction what is held.
        eviction: which held groups are dropped, after each put and each new version.
        max_staleness: oldest group that may be taken, in versions; None = any.
        filters: each gives a reason to drop a group that is put, or None. Non-finite log-probs are always dropped.
        max_filtered_in_a_row: so many filtered groups without one that passes are an error of `put`; None = never.
        wait_timeout_s: time limit of a wait, seconds.
    """

    def __init__(
        self,
        *,
        order: Order,
        eviction: Eviction,
        max_outstanding: int | None,
        max_staleness: int | None = None,
        filters: Sequence[Filter] = (),
        max_filtered_in_a_row: int | None = None,
        wait_timeout_s: float = 600.0,
    ) -> None:
        if not 0 < wait_timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"wait_timeout_s must be in (0, {threading.TIMEOUT_MAX:.0f}], got {wait_timeout_s}")
        self.order, self.eviction, self.filters = order, eviction, (non_finite_logprobs, *filters)
        self.max_outstanding, self.max_staleness = max_outstanding, max_staleness
        self.max_filtered_in_a_row, self.wait_timeout_s = max_filtered_in_a_row, wait_timeout_s
        self._ledger = TicketLedger()
        # re-entrant, so that a signal handler may close the buffer whatever the main thread is doing
        self._changed = threading.Condition(threading.RLock())
        self._max_admissions: int | None = None
        self._num_filtered_in_a_row = 0
        self._advanced_at_s = time.monotonic()
        self._is_closed = False
        self._closing_error: BaseException | None = None

    @property
    def policy_version(self) -> int:
        """The version that `advance` published last."""
        return self._ledger.policy_version

    def admit(self, wait: bool) -> Ticket | None:
        """Leave to draw a prompt, or None when there is no room and `wait` is False."""
        with self._changed:
            self._raise_if_closed()
            if not wait and not self._has_room():
                return None
            self._wait_until(
                self._has_room, "admit", "room, which advance or a drop makes", is_excused=self._is_training
            )
            return self._ledger.admit()

    def put(self, group: SampleGroup) -> None:
        """Hand in the complete group of a ticket; never waits. Keeps copies of its tensors.

        Raises:
            ValueError: the ticket of the group isn't in flight.
            RuntimeError: this was filtered group number `max_filtered_in_a_row` without one that passed.
        """
        reason = next((reason for check in self.filters if (reason := check(group))), None)
        owned = group if reason else own_group(group)  # before the lock: others needn't wait for copies
        with self._changed:
            self._raise_if_closed()
            record = self._ledger.in_flight(group.prompt.ticket)
            if reason:
                self._ledger.drop(record, reason, group)
            else:
                self._ledger.hold(record, owned)
                self._evict()
            self._changed.notify_all()
            self._count_filtered(bool(reason))

    def drop(self, ticket: Ticket, reason: str) -> None:
        """Give up a ticket that is in flight; also after `close`."""
        with self._changed:
            self._ledger.drop(self._ledger.in_flight(ticket), reason)
            self._changed.notify_all()

    def take(self, num_groups: int) -> list[SampleGroup]:
        """The next groups in order, all at once; what is left, perhaps nothing, when the data ends before that.

        Raises:
            ValueError: so many groups can never be outstanding together.
            RuntimeError: a group is stale: its engine used older weights than its ticket, or versions rose without
                a batch being taken.
        """
        with self._changed:
            self._raise_if_closed()
            self._check_is_possible(num_groups)
            self._wait_until(lambda: self._next(num_groups) is not None, f"take({num_groups})", "put")
            records = self._next(num_groups)
            assert records is not None
            self._check_is_fresh(records)
            return self._ledger.take(records)

    def can_take(self, num_groups: int) -> bool:
        """Whether `take` would return without waiting."""
        with self._changed:
            self._raise_if_closed()
            return self._next(num_groups) is not None

    def advance(self, policy_version: int, discard_reason: str | None = None) -> None:
        """The groups taken so far are trained, or dropped for a reason, and `policy_version` is published.

        Never waits, and works after `close`: what was trained counts. Discarding may leave the version as it is.

        Raises:
            ValueError: the version does not rise.
        """
        with self._changed:
            lowest = self.policy_version + (discard_reason is None)
            if policy_version < lowest:
                raise ValueError(f"policy_version must rise to at least {lowest}, got {policy_version}")
            self._ledger.commit(discard_reason)
            self._ledger.policy_version = policy_version
            self._advanced_at_s = time.monotonic()
            self._evict()
            self._changed.notify_all()

    def limit_admissions(self, num_admissions: int | None) -> None:
        """Let the data end after so many admissions of this process; None = never."""
        with self._changed:
            if num_admissions is not None and num_admissions < self._ledger.num_admitted:
                raise ValueError(f"num_admissions must be >= {self._ledger.num_admitted}, got {num_admissions}")
            self._max_admissions = num_admissions
            self._changed.notify_all()

    def close(self, error: BaseException | None = None) -> None:
        """From now on `admit`, `put` and `take` raise BufferClosed, caused by `error`; wakes every wait."""
        with self._changed:
            if not self._is_closed:
                self._is_closed, self._closing_error = True, error
            self._changed.notify_all()

    def report(self) -> dict[str, Any]:
        """Counts since step 0: drawn, trained, held (taken ones too), in_flight, dropped by reason."""
        with self._changed:
            self._ledger.check_conservation()
            return self._ledger.report()

    def metrics(self) -> dict[str, float]:
        """The counts as `buffer/num_*`, and the versions published since the oldest ticket in flight was admitted.

        `num_dropped_tokens_*` counts the sampled tokens of groups dropped by this process before they were taken: many
        tokens a group say that long answers are what is dropped.
        """
        with self._changed:
            counts, in_flight = self.report(), self._ledger.outstanding(TicketState.IN_FLIGHT)
            age = self.policy_version - in_flight[0].ticket.policy_version if in_flight else 0
            tokens = dict(self._ledger.num_dropped_tokens)
        named = {f"buffer/num_dropped_{reason}": count for reason, count in counts.pop("dropped").items()}
        named |= {f"buffer/num_dropped_tokens_{reason}": count for reason, count in tokens.items()}
        named |= {f"buffer/num_{name}": count for name, count in counts.items()}
        return {name: float(count) for name, count in named.items()} | {"buffer/oldest_in_flight_versions": float(age)}

    def state_dict(self) -> dict[str, Any]:
        """One consistent moment: counts, version, `num_admitted` and `outstanding_ordinals` for the prompt queue."""
        with self._changed:
            return self._ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a checkpoint, before the first admission; its outstanding prompts are drawn again."""
        with self._changed:
            self._ledger.load_state_dict(state)

    def _has_ended(self) -> bool:
        return self._max_admissions is not None and self._ledger.num_admitted >= self._max_admissions

    def _has_room(self) -> bool:
        is_below_limit = self.max_outstanding is None or self._ledger.num_outstanding < self.max_outstanding
        return is_below_limit and not self._has_ended()

    def _next(self, num_groups: int) -> list[TicketRecord] | None:
        pending = self._ledger.outstanding(TicketState.IN_FLIGHT, TicketState.HELD)
        ready = self.order(pending)[:num_groups]
        # what is ready is all there will be: no ticket to come, none in flight
        is_rest = self._has_ended() and len(ready) == len(pending)
        return ready if len(ready) == num_groups or is_rest else None

    def _evict(self) -> None:
        held = self._ledger.outstanding(TicketState.HELD)
        for record in self.eviction.victims(held, self.policy_version):
            self._ledger.drop(record, self.eviction.reason)

    def _count_filtered(self, is_filtered: bool) -> None:
        self._num_filtered_in_a_row = self._num_filtered_in_a_row + 1 if is_filtered else 0
        if self._num_filtered_in_a_row == self.max_filtered_in_a_row:
            raise RuntimeError(
                f"buffer.max_filtered_in_a_row: {self.max_filtered_in_a_row} groups in a row were dropped, no signal "
                f"is left to train on; dropped so far: {dict(self._ledger.num_dropped)}. Raise rollout.group_size or "
                "rollout.temperature, or train on other prompts"
            )

    def _check_is_possible(self, num_groups: int) -> None:
        taken = len(self._ledger.outstanding(TicketState.TAKEN))
        if num_groups < 1:
            raise ValueError(f"num_groups must be >= 1, got {num_groups}")
        if self.max_outstanding is not None and taken + num_groups > self.max_outstanding:
            raise ValueError(
                f"take({num_groups}) with {taken} groups taken before and not committed by advance would wait for "
                f"ever: at most {self.max_outstanding} groups are outstanding"
            )

    def _check_is_fresh(self, records: Sequence[TicketRecord]) -> None:
        for record in records:
            oldest = record.held_group().min_policy_version
            if self.max_staleness is not None and is_stale(self.policy_version, oldest, self.max_staleness):
                raise RuntimeError(
                    f"group {record.held_group().prompt.group_id} holds tokens of policy version {oldest}, older than "
                    f"max_staleness {self.max_staleness} at version {self.policy_version}; its ticket was admitted at "
                    f"version {record.ticket.policy_version}. Load weights after admission, publish once per batch"
                )

    def _is_training(self) -> bool:
        return bool(self._ledger.outstanding(TicketState.TAKEN))

    def _wait_until(
        self,
        is_ready: Callable[[], bool],
        waiter: str,
        awaited: str,
        is_excused: Callable[[], bool] = lambda: False,
    ) -> None:
        began_at_s = time.monotonic()
        while not is_ready():
            now_s = time.monotonic()
            since_s = now_s if is_excused() else max(began_at_s, self._advanced_at_s)
            remaining_s = since_s + self.wait_timeout_s - now_s
            if remaining_s <= 0:
                raise BufferStalled(self._describe_stall(waiter, awaited))
            self._changed.wait(remaining_s)
            self._raise_if_closed()

    def _describe_stall(self, waiter: str, awaited: str) -> str:
        in_flight = self._ledger.outstanding(TicketState.IN_FLIGHT)
        oldest = f"oldest in flight {in_flight[0].ticket}" if in_flight else "none in flight"
        return (
            f"{waiter} waited {self.wait_timeout_s:g} s for {awaited}, at policy version {self.policy_version}: "
            f"{self._ledger.report()}, {oldest}, at most {self.max_outstanding} outstanding"
        )

    def _raise_if_closed(self) -> None:
        if self._is_closed:
            raise BufferClosed("the buffer was closed") from self._closing_error
