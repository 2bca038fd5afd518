"""The three choices a buffer is made of: order, eviction and filters; flow control is one number, see `ReplayBuffer`.

Knows records and groups; does not know threads, waits or which choices go together (`presets.py` does).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.buffer.ledger import TicketRecord, TicketState
from asynctensorrlhf.buffer.staleness import is_stale
from asynctensorrlhf.types import SampleGroup

# relative to max(1, largest absolute reward): below it rewards count as equal, as group-relative advantages do
REWARD_TOLERANCE = 1e-6

Order = Callable[[Sequence[TicketRecord]], list[TicketRecord]]
Filter = Callable[[SampleGroup], str | None]


def admission_order(pending: Sequence[TicketRecord]) -> list[TicketRecord]:
    """Groups in the order of their tickets; one is takeable when no earlier ticket is in flight.

    A straggler holds later groups back, which is what bounds staleness: a group never waits longer than the groups
    admitted before it need.

    Args:
        pending: tickets in flight or held, in admission order.
    """
    return list(takewhile(lambda record: record.state is TicketState.HELD, pending))


def completion_order(pending: Sequence[TicketRecord]) -> list[TicketRecord]:
    """Groups in the order in which they were put: nothing waits for a straggler, nothing bounds its staleness."""
    held = [record for record in pending if record.state is TicketState.HELD]
    return sorted(held, key=lambda record: record.arrival)


@runtime_checkable
class Eviction(Protocol):
    """Which held groups are dropped; asked after every `put` and `advance`. `reason` is counted."""

    reason: ClassVar[str]

    def victims(self, held: Sequence[TicketRecord], policy_version: int) -> Sequence[TicketRecord]:
        """Those of `held` that go now."""
        ...


@dataclass(frozen=True)
class KeepAll:
    """Nothing is evicted."""

    reason: ClassVar[str] = "evicted"

    def victims(self, held: Sequence[TicketRecord], policy_version: int) -> Sequence[TicketRecord]:
        """Nobody."""
        return ()


@dataclass(frozen=True)
class EvictOldest:
    """At most `max_held` groups stay: the last ones put."""

    max_held: int
    reason: ClassVar[str] = "evicted"

    def victims(self, held: Sequence[TicketRecord], policy_version: int) -> Sequence[TicketRecord]:
        """The first ones put."""
        by_arrival = sorted(held, key=lambda record: record.arrival)
        return by_arrival[: max(0, len(by_arrival) - self.max_held)]


@dataclass(frozen=True)
class EvictStale:
    """Groups older than `max_staleness` versions go; one at exactly the limit stays."""

    max_staleness: int
    reason: ClassVar[str] = "stale"

    def victims(self, held: Sequence[TicketRecord], policy_version: int) -> Sequence[TicketRecord]:
        """Those past the limit."""
        return [r for r in held if is_stale(policy_version, r.held_group().min_policy_version, self.max_staleness)]


def non_finite_logprobs(group: SampleGroup) -> str | None:
    """Drop a group with a NaN or infinite behaviour log-probability: its importance ratios mean nothing.

    Reads one number back from the device of the samples, in the thread that puts.
    """
    logprobs = torch.cat([sample.behaviour_logprobs for sample in group.samples])
    return None if bool(torch.isfinite(logprobs).all()) else "non_finite_logprobs"


def zero_variance(group: SampleGroup) -> str | None:
    """Drop a group whose scored rewards are all equal, or that has no score: it carries no group-relative signal."""
    return None if has_reward_variance(group.rewards) else "zero_variance"


def has_reward_variance(rewards: Float[Tensor, " sample"]) -> bool:
    """Whether scored rewards differ by more than `REWARD_TOLERANCE` of their size; NaN = not scored."""
    scored = rewards[~rewards.isnan()]
    if not len(scored):
        return False
    return bool(scored.max() - scored.min() > REWARD_TOLERANCE * scored.abs().max().clamp(min=1.0))
