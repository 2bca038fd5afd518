"""A buffer for library use that takes samples in any order and gives out complete groups.

Knows how many samples a group has; does not know how rewards or advantages are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.buffer.experience_buffer import HasCurrentVersion, Shelf
from asynctensorrlhf.buffer.ownership import own_value
from asynctensorrlhf.buffer.strategies import has_reward_variance

AdvantageFn = Callable[[Float[Tensor, " sample"]], Float[Tensor, " sample"]]


@dataclass(frozen=True)
class GroupBufferEntry:
    """One sample of a group.

    Attributes:
        group_id: which group it belongs to.
        sample: whatever is to be trained.
        reward: its score, NaN = no score.
        sample_index: place within the group; None: the order of arrival.
        policy_version: oldest version that produced any of it.
        group_size: samples of its group when that isn't the buffer's `group_size`.
        advantage: filled in when the group is complete.
    """

    group_id: Hashable
    sample: Any
    reward: float | Tensor
    sample_index: int | None = None
    policy_version: int = 0
    group_size: int | None = None
    advantage: Tensor | None = None


class GroupAwareReplayBuffer:
    """Samples in, complete groups out, oldest completed first. Thread-safe; nobody waits; keeps copies.

    The advantages of a group are computed once, when its last sample comes, and travel with its entries. A group is as
    old as its oldest sample, and is kept, dropped or given out as a whole.

    Args:
        group_size: samples of a group.
        max_groups: most complete groups; one more drops the oldest.
        max_size: the same, for callers that know the buffers by this name.
        max_incomplete: most groups that samples are missing of; one more drops the oldest. A bound on memory, for
            producers that give groups up: samples of a dropped group that come later start it anew.
        max_staleness: oldest group that stays, in versions; None = any.
        filter_zero_variance: drop groups whose scored rewards are all equal.
        advantage_fn: rewards of one group to its advantages; None: entries carry none.
        version_manager: tells the newest version; without one it is what `advance` said last.
    """

    def __init__(
        self,
        group_size: int,
        max_groups: int = 1024,
        *,
        max_size: int | None = None,
        max_incomplete: int = 1024,
        max_staleness: int | None = None,
        filter_zero_variance: bool = False,
        advantage_fn: AdvantageFn | None = None,
        version_manager: HasCurrentVersion | None = None,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        if max_incomplete < 1:
            raise ValueError(f"max_incomplete must be >= 1, got {max_incomplete}")
        self.max_incomplete = max_incomplete
        self.group_size, self.filter_zero_variance, self.advantage_fn = group_size, filter_zero_variance, advantage_fn
        self._complete = Shelf(
            max_size=max_groups if max_size is None else max_size,
            max_staleness=max_staleness,
            version_manager=version_manager,
        )
        self._incomplete: dict[Hashable, list[GroupBufferEntry]] = {}
        self._lock = threading.Lock()

    def push(self, entry: GroupBufferEntry) -> None:
        """Add a copy of a sample.

        Raises:
            ValueError: its index came before in this group, or it names another group size than the samples before.
        """
        with self._lock:
            entries = self._incomplete.get(entry.group_id, [])
            own = self._placed(entry, entries)
            if len(entries) + 1 == own.group_size:
                self._incomplete.pop(entry.group_id, None)
                self._complete_group([*entries, own])
            else:
                self._incomplete.setdefault(entry.group_id, entries).append(own)
                self._bound_incomplete()

    def sample(self, num_groups: int, current_version: int | None = None) -> list[list[GroupBufferEntry]]:
        """Remove and return up to `num_groups` complete groups, each ordered by `sample_index`."""
        return self._complete.pop(num_groups, current_version)

    def advance(self, version: int) -> None:
        """Tell the newest version, when there is no version manager to ask."""
        self._complete.advance(version)

    @property
    def num_dropped(self) -> int:
        """Groups that were dropped instead of sampled; by reason in `dropped`."""
        return sum(self._complete.dropped.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason: evicted, stale, zero_variance, incomplete."""
        return self._complete.dropped

    def __len__(self) -> int:
        return len(self._complete)

    def _placed(self, entry: GroupBufferEntry, entries: list[GroupBufferEntry]) -> GroupBufferEntry:
        group_size = self.group_size if entry.group_size is None else entry.group_size
        index = len(entries) if entry.sample_index is None else entry.sample_index
        if any(other.group_size != group_size for other in entries):
            raise ValueError(f"group {entry.group_id}: group_size must be {entries[0].group_size}, got {group_size}")
        if not 0 <= index < group_size or any(other.sample_index == index for other in entries):
            raise ValueError(f"group {entry.group_id}: sample_index must be new and below {group_size}, got {index}")
        return replace(
            entry,
            sample=own_value(entry.sample),
            reward=own_value(entry.reward),
            sample_index=index,
            group_size=group_size,
        )

    def _complete_group(self, entries: list[GroupBufferEntry]) -> None:
        entries.sort(key=lambda entry: entry.sample_index or 0)
        rewards = torch.stack([torch.as_tensor(entry.reward, dtype=torch.float32) for entry in entries])
        if self.filter_zero_variance and not has_reward_variance(rewards):
            self._complete.count_dropped("zero_variance")
            return
        if self.advantage_fn is not None:
            advantages = self.advantage_fn(rewards)
            entries = [replace(entry, advantage=value) for entry, value in zip(entries, advantages, strict=True)]
        self._complete.append(entries, min(entry.policy_version for entry in entries))

    def _bound_incomplete(self) -> None:
        if len(self._incomplete) > self.max_incomplete:
            del self._incomplete[next(iter(self._incomplete))]
            self._complete.count_dropped("incomplete")
