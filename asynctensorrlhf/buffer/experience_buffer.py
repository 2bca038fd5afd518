"""Bounded buffers for library use: push anything, sample the oldest, nobody waits.

Knows order, capacity and versions of what is pushed; does not know tickets, groups or the run.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from asynctensorrlhf.buffer.ownership import own_value
from asynctensorrlhf.buffer.staleness import is_stale

VERSION_NAMES = ("min_policy_version", "policy_version", "version")


@runtime_checkable
class HasCurrentVersion(Protocol):
    """Where the newest policy version can be read, such as a VersionManager."""

    @property
    def current(self) -> int:
        """Number of weight publications so far."""
        ...


class Shelf:
    """FIFO of at most `max_size` (version, item) pairs; the mechanism that the buffers below share. Thread-safe.

    Args:
        max_size: most items; one more drops the oldest as `evicted`.
        max_staleness: oldest item that stays, in versions; what is older is dropped as `stale`. None = any.
        version_manager: tells the newest version; without one it is what `advance` said last, 0 before.
    """

    def __init__(
        self, *, max_size: int, max_staleness: int | None = None, version_manager: HasCurrentVersion | None = None
    ) -> None:
        if max_size < 1:
            raise ValueError(f"max_size must be >= 1, got {max_size}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be >= 0, got {max_staleness}")
        self.max_size, self.max_staleness, self.version_manager = max_size, max_staleness, version_manager
        self._dropped: Counter[str] = Counter()
        self._advanced_to = 0
        self._items: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()

    def append(self, item: Any, version: int = 0) -> None:
        """Add an item, as it is."""
        with self._lock:
            self._items.append((version, item))
            self._discard_stale(None)
            while len(self._items) > self.max_size:
                self._items.popleft()
                self._dropped["evicted"] += 1

    def pop(self, num_items: int, current_version: int | None = None) -> list[Any]:
        """Remove and return up to `num_items` of the oldest."""
        if num_items < 0:
            raise ValueError(f"the number of items must be >= 0, got {num_items}")
        with self._lock:
            self._discard_stale(current_version)
            return [self._items.popleft()[1] for _ in range(min(num_items, len(self._items)))]

    def advance(self, version: int) -> None:
        """Tell the newest version."""
        with self._lock:
            if version < self._advanced_to:
                raise ValueError(f"version must be >= {self._advanced_to}, got {version}")
            self._advanced_to = version

    def count_dropped(self, reason: str) -> None:
        """Count one that was dropped before it came here."""
        with self._lock:
            self._dropped[reason] += 1

    @property
    def dropped(self) -> dict[str, int]:
        """How many were dropped, by reason."""
        with self._lock:
            return dict(self._dropped)

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def _discard_stale(self, current_version: int | None) -> None:
        if self.max_staleness is None:
            return
        if current_version is None:
            current_version = self.version_manager.current if self.version_manager else self._advanced_to
        fresh = [entry for entry in self._items if not is_stale(current_version, entry[0], self.max_staleness)]
        if len(fresh) < len(self._items):
            self._dropped["stale"] += len(self._items) - len(fresh)
            self._items = deque(fresh)


class BoundedReplayBuffer:
    """The last `max_size` experiences, oldest first. Thread-safe; keeps copies of what is pushed.

    buffer = BoundedReplayBuffer(max_size=2)
    buffer.push("a"); buffer.push("b"); buffer.push("c")
    buffer.sample(8)  # ["b", "c"]
    """

    def __init__(self, max_size: int) -> None:
        self._shelf = Shelf(max_size=max_size)

    def push(self, exp: Any) -> None:
        """Add a copy of an experience; drops the oldest one when full."""
        self._shelf.append(own_value(exp))

    def sample(self, batch_size: int) -> list[Any]:
        """Remove and return up to `batch_size` of the oldest; never waits."""
        return self._shelf.pop(batch_size)

    @property
    def num_dropped(self) -> int:
        """Experiences that were dropped instead of sampled."""
        return sum(self._shelf.dropped.values())

    def __len__(self) -> int:
        return len(self._shelf)


class VersionedReplayBuffer:
    """The last `max_size` experiences that are at most `max_staleness` versions old. Thread-safe; keeps copies.

    What is older is dropped when it is pushed and when the buffer is sampled; one at exactly the limit is kept.
    """

    def __init__(self, max_size: int, max_staleness: int, version_manager: HasCurrentVersion | None = None) -> None:
        self._shelf = Shelf(max_size=max_size, max_staleness=max_staleness, version_manager=version_manager)

    def push(self, exp: Any, version: int | None = None) -> None:
        """Add a copy of an experience made by policy `version`, or by the version that it says itself.

        Raises:
            ValueError: no `version`, and `exp` has none of the attributes or keys in `VERSION_NAMES`.
        """
        self._shelf.append(own_value(exp), version_of(exp) if version is None else version)

    def sample(self, batch_size: int, current_version: int | None = None) -> list[Any]:
        """Remove and return up to `batch_size` of the oldest that aren't stale at `current_version`; never waits."""
        return self._shelf.pop(batch_size, current_version)

    def advance(self, version: int) -> None:
        """Tell the newest version, when there is no version manager to ask."""
        self._shelf.advance(version)

    @property
    def num_dropped(self) -> int:
        """Experiences that were dropped instead of sampled."""
        return sum(self._shelf.dropped.values())

    def __len__(self) -> int:
        return len(self._shelf)


class ReplayBufferActor:
    """A buffer that others call by handle: it passes every public call on and gives nothing else away.

    Here handle and buffer live in one process, and the buffer's own lock makes the calls safe from any thread.

    Args:
        buffer: any buffer; None: a `BoundedReplayBuffer` of its own.
        options: of that one.
    """

    def __init__(self, buffer: Any = None, **options: Any) -> None:
        self._buffer = BoundedReplayBuffer(**options) if buffer is None else buffer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self._buffer, name)

    def __len__(self) -> int:
        return len(self._buffer)


def version_of(exp: Any) -> int:
    """The version that made an experience: the first of `VERSION_NAMES` among its attributes or keys."""
    for name in VERSION_NAMES:
        value = exp.get(name) if isinstance(exp, Mapping) else getattr(exp, name, None)
        if value is not None:
            return int(value)
    raise ValueError(f"version must be given, or be one of {VERSION_NAMES} in the experience, got {type(exp).__name__}")
