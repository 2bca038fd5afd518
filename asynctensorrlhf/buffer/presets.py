"""The named buffers: which order, flow control, eviction and filters go together.

Knows what each config option stands for and which settings would deadlock; does not know how a buffer works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from asynctensorrlhf.buffer.replay_buffer import ReplayBuffer
from asynctensorrlhf.buffer.staleness import free_outstanding, paced_outstanding
from asynctensorrlhf.buffer.strategies import (
    EvictOldest,
    EvictStale,
    Filter,
    KeepAll,
    admission_order,
    completion_order,
    zero_variance,
)

# groups with log-probs that are not finite come from weights that are not: no use to go on drawing them
MAX_NON_FINITE_IN_A_ROW = 100

StalenessPolicy = Literal["pace", "evict"]


def bounded(
    *,
    groups_per_step: int,
    wait_timeout_s: float = 600.0,
    synchronous: bool = False,
    capacity: int,
    when_full: Literal["block", "evict_oldest"],
) -> ReplayBuffer:
    """First put, first taken; no bound on staleness.

    Args:
        groups_per_step: groups of one `take`.
        wait_timeout_s: time limit of every wait, seconds.
        synchronous: exactly `groups_per_step` groups for each policy version, in admission order, instead.
        capacity: most groups outstanding (block) or held (evict_oldest; in flight is what the engines have room for).
        when_full: stop admission, or drop the group that was put first.

    Raises:
        ValueError: a setting out of range, or one that would deadlock.
    """
    _check_capacity(capacity, groups_per_step)
    if when_full not in ("block", "evict_oldest"):
        raise ValueError(f"buffer.when_full must be block or evict_oldest, got {when_full}")
    if synchronous:
        return _paced(0, groups_per_step, wait_timeout_s)
    evicts = when_full == "evict_oldest"
    return ReplayBuffer(
        order=completion_order,
        max_outstanding=None if evicts else capacity,
        eviction=EvictOldest(capacity) if evicts else KeepAll(),
        max_filtered_in_a_row=MAX_NON_FINITE_IN_A_ROW,
        wait_timeout_s=wait_timeout_s,
    )


def versioned(
    *,
    groups_per_step: int,
    wait_timeout_s: float = 600.0,
    synchronous: bool = False,
    capacity: int | None,
    max_staleness: int,
    staleness_policy: StalenessPolicy,
) -> ReplayBuffer:
    """Admission order, and no group older than `max_staleness` versions is ever taken.

    Args:
        groups_per_step: groups of one `take`.
        wait_timeout_s: time limit of every wait, seconds.
        synchronous: the same with `max_staleness` 0 and pace: what `trainer.mode=sync` means.
        capacity: most groups outstanding; None: `paced_outstanding` for pace, `free_outstanding` for evict.
        max_staleness: versions behind the trainer; 0 makes an asynchronous run equal to the synchronous one.
        staleness_policy: `pace` admits only what will be fresh enough, so nothing is generated in vain; `evict` lets
            rollouts fill the capacity, drops what gets too old and counts it as `stale`.

    Raises:
        ValueError: a setting out of range, or one that would deadlock.
    """
    return _versioned(groups_per_step, wait_timeout_s, synchronous, capacity, max_staleness, staleness_policy)


def group(
    *,
    groups_per_step: int,
    wait_timeout_s: float = 600.0,
    synchronous: bool = False,
    capacity: int | None,
    max_staleness: int,
    staleness_policy: StalenessPolicy,
    filter_zero_variance: bool,
    max_filtered_in_a_row: int,
) -> ReplayBuffer:
    """Like `versioned`; groups whose rewards are all equal are dropped and refilled one for one.

    Args:
        groups_per_step: groups of one `take`.
        wait_timeout_s: time limit of every wait, seconds.
        synchronous: the same with `max_staleness` 0 and pace; the filter stays.
        capacity: as in `versioned`.
        max_staleness: as in `versioned`.
        staleness_policy: as in `versioned`.
        filter_zero_variance: drop groups whose scored rewards are all equal, counted as `zero_variance`.
        max_filtered_in_a_row: so many filtered groups without one that passes end the run with an error.

    Raises:
        ValueError: a setting out of range, or one that would deadlock.
    """
    if max_filtered_in_a_row < 1:
        raise ValueError(f"buffer.max_filtered_in_a_row must be >= 1, got {max_filtered_in_a_row}")
    return _versioned(
        groups_per_step,
        wait_timeout_s,
        synchronous,
        capacity,
        max_staleness,
        staleness_policy,
        filters=(zero_variance,) if filter_zero_variance else (),
        max_filtered_in_a_row=max_filtered_in_a_row,
    )


def _versioned(
    groups_per_step: int,
    wait_timeout_s: float,
    synchronous: bool,
    capacity: int | None,
    max_staleness: int,
    staleness_policy: str,
    filters: Sequence[Filter] = (),
    max_filtered_in_a_row: int = MAX_NON_FINITE_IN_A_ROW,
) -> ReplayBuffer:
    _check_capacity(capacity, groups_per_step)
    if max_staleness < 0:
        raise ValueError(f"buffer.max_staleness must be >= 0, got {max_staleness}")
    if staleness_policy not in ("pace", "evict"):
        raise ValueError(f"buffer.staleness_policy must be pace or evict, got {staleness_policy}")
    if synchronous:
        return _paced(0, groups_per_step, wait_timeout_s, None, filters, max_filtered_in_a_row)
    if staleness_policy == "pace":
        return _paced(max_staleness, groups_per_step, wait_timeout_s, capacity, filters, max_filtered_in_a_row)
    return ReplayBuffer(
        order=admission_order,
        max_outstanding=capacity or free_outstanding(max_staleness, groups_per_step),
        eviction=EvictStale(max_staleness),
        max_staleness=max_staleness,
        filters=filters,
        max_filtered_in_a_row=max_filtered_in_a_row,
        wait_timeout_s=wait_timeout_s,
    )


def _paced(
    max_staleness: int,
    groups_per_step: int,
    wait_timeout_s: float,
    capacity: int | None = None,
    filters: Sequence[Filter] = (),
    max_filtered_in_a_row: int = MAX_NON_FINITE_IN_A_ROW,
) -> ReplayBuffer:
    pace = paced_outstanding(max_staleness, groups_per_step)
    return ReplayBuffer(
        order=admission_order,
        max_outstanding=pace if capacity is None else min(pace, capacity),
        eviction=KeepAll(),
        max_staleness=max_staleness,
        filters=filters,
        max_filtered_in_a_row=max_filtered_in_a_row,
        wait_timeout_s=wait_timeout_s,
    )


def _check_capacity(capacity: int | None, groups_per_step: int) -> None:
    if groups_per_step < 1:
        raise ValueError(f"trainer.groups_per_step must be >= 1, got {groups_per_step}")
    if capacity is not None and capacity < groups_per_step:
        raise ValueError(
            f"buffer.capacity must be >= trainer.groups_per_step ({groups_per_step}), got {capacity}: a step would "
            "wait for ever for groups that there is no room for"
        )
