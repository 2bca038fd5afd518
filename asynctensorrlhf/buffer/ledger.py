"""Where every ticket is and how many ended how.

Knows the states of a ticket and the counts; does not know threads, order or limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from asynctensorrlhf.types import SampleGroup, Ticket


class TicketState(Enum):
    """States of a ticket that is outstanding; `trained` and `dropped` tickets are only counted."""

    IN_FLIGHT = auto()  # admitted, its group is being generated
    HELD = auto()  # its group was put and waits for the trainer
    TAKEN = auto()  # the trainer has the group, but has not trained it yet


@dataclass
class TicketRecord:
    """An outstanding ticket; `arrival` counts puts, `group` is there while it is held."""

    ticket: Ticket
    state: TicketState = TicketState.IN_FLIGHT
    group: SampleGroup | None = None
    arrival: int = -1

    def held_group(self) -> SampleGroup:
        """The group of a held ticket."""
        assert self.group is not None, f"ticket {self.ticket.ordinal} is {self.state.name} and holds no group"
        return self.group


class TicketLedger:
    """The state machine in_flight -> held -> taken -> trained | dropped(reason), and its counts. Not thread-safe.

    Its size is bounded by the number of outstanding tickets: a ticket that ends leaves a count behind.
    """

    def __init__(self) -> None:
        self.policy_version = 0
        self.num_admitted = 0
        self.num_trained = 0
        self.num_dropped: Counter[str] = Counter()
        self.num_dropped_tokens: Counter[str] = Counter()
        self._num_drawn_before = 0
        self._num_put = 0
        self._outstanding: dict[int, TicketRecord] = {}

    def outstanding(self, *states: TicketState) -> list[TicketRecord]:
        """Outstanding tickets in admission order: those in one of `states`, or all."""
        return [record for record in self._outstanding.values() if not states or record.state in states]

    @property
    def num_outstanding(self) -> int:
        """Tickets neither trained nor dropped."""
        return len(self._outstanding)

    def admit(self) -> Ticket:
        """Open a ticket at the current policy version."""
        ticket = Ticket(ordinal=self.num_admitted, policy_version=self.policy_version)
        self._outstanding[ticket.ordinal] = TicketRecord(ticket)
        self.num_admitted += 1
        return ticket

    def in_flight(self, ticket: Ticket) -> TicketRecord:
        """The record of a ticket that is being generated.

        Raises:
            ValueError: the ticket was never admitted here, or was handed in or given up before.
        """
        record = self._outstanding.get(ticket.ordinal)
        if record is not None and record.ticket == ticket and record.state is TicketState.IN_FLIGHT:
            return record
        if record is not None and record.ticket == ticket:
            why = f"its group was put before and is {record.state.name.lower()}"
        elif record is None and 0 <= ticket.ordinal < self.num_admitted:
            why = "it was trained or dropped before"
        else:
            why = "this buffer never admitted it"
        raise ValueError(f"{ticket} is not in flight: {why}")

    def hold(self, record: TicketRecord, group: SampleGroup) -> None:
        """Keep the group of a ticket in flight."""
        record.state, record.group, record.arrival = TicketState.HELD, group, self._num_put
        self._num_put += 1

    def take(self, records: Iterable[TicketRecord]) -> list[SampleGroup]:
        """Hand the held groups out; the ledger keeps no reference to them."""
        groups = []
        for record in records:
            groups.append(record.held_group())
            record.state, record.group = TicketState.TAKEN, None
        return groups

    def drop(self, record: TicketRecord, reason: str, group: SampleGroup | None = None) -> None:
        """End an outstanding ticket without training it; counts the tokens of `group`, or of the one it holds."""
        if not reason:
            raise ValueError("a ticket is dropped for a reason, got an empty one")
        del self._outstanding[record.ticket.ordinal]
        self.num_dropped[reason] += 1
        if (group := group or record.group) is not None:
            self.num_dropped_tokens[reason] += sum(len(sample.completion_ids) for sample in group.samples)

    def commit(self, discard_reason: str | None) -> None:
        """End every taken ticket: trained, or dropped for the reason."""
        for record in self.outstanding(TicketState.TAKEN):
            if discard_reason is not None:
                self.drop(record, discard_reason)
            else:
                del self._outstanding[record.ticket.ordinal]
                self.num_trained += 1

    def report(self) -> dict[str, Any]:
        """Counts since step 0, earlier processes included; taken groups count as held until they are committed."""
        in_flight = len(self.outstanding(TicketState.IN_FLIGHT))
        return {
            "drawn": self._num_drawn_before + self.num_admitted,
            "trained": self.num_trained,
            "held": self.num_outstanding - in_flight,
            "in_flight": in_flight,
            "dropped": dict(self.num_dropped),
        }

    def check_conservation(self) -> None:
        """Assert drawn = trained + held + in flight + dropped."""
        report = self.report()
        ended = report["trained"] + sum(report["dropped"].values())
        assert report["drawn"] == ended + report["held"] + report["in_flight"], f"tickets were lost: {report}"

    def state_dict(self) -> dict[str, Any]:
        """Counts of what ended, and which tickets have not: one consistent moment, bounded in size."""
        return {
            "policy_version": self.policy_version,
            "trained": self.num_trained,
            "dropped": dict(self.num_dropped),
            "num_admitted": self.num_admitted,
            "outstanding_ordinals": list(self._outstanding),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a checkpoint; its outstanding prompts are drawn again, so they don't count as drawn."""
        if self.num_admitted:
            raise RuntimeError(f"a checkpoint is loaded before the first admission, got {self.num_admitted} admissions")
        self.policy_version, self.num_trained = state["policy_version"], state["trained"]
        self.num_dropped = Counter(state["dropped"])
        self._num_drawn_before = self.num_trained + sum(self.num_dropped.values())
