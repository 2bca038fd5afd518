"""The policy version of a run.

Knows how many publications there were; does not know what was published.
"""

from __future__ import annotations

import threading

from asynctensorrlhf.buffer.staleness import staleness


class VersionManager:
    """Counts weight publications. Thread-safe; never waits.

    Args:
        start: publications before, as after a resume.
    """

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start must be >= 0, got {start}")
        self._current = start
        self._lock = threading.Lock()

    @property
    def current(self) -> int:
        """Number of weight publications so far."""
        return self._current

    def bump(self) -> int:
        """Count one more publication and return the new version."""
        with self._lock:
            self._current += 1
            return self._current

    def staleness(self, version: int) -> int:
        """Versions between `version` and the current one.

        Raises:
            ValueError: `version` isn't published yet.
        """
        return staleness(self._current, version)
