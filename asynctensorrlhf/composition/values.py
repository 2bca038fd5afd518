"""The resolved values of a composition, as cross checks read them.

Knows paths and declared defaults; does not know what a key means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ABSENT = object()


class Values:
    """Resolved values by dotted path; an absent key is `ABSENT`, which equals nothing.

    Args:
        plain: the config.
        raw_output_dir: as it is written.
        declared: defaults by dotted path, below what presets, experiments and command lines make of them.
    """

    def __init__(self, plain: Mapping[str, Any], raw_output_dir: str, declared: Mapping[str, Any]) -> None:
        self._plain = plain
        self._declared = declared
        self.raw_output_dir = raw_output_dir

    def __getitem__(self, path: str) -> Any:
        node: Any = self._plain
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return ABSENT
            node = node[part]
        return node

    def has(self, *paths: str) -> bool:
        """Whether every key is there and not null."""
        return all(self[path] is not ABSENT and self[path] is not None for path in paths)

    def is_on(self, path: str) -> bool:
        """Whether a coefficient is there and not 0."""
        return self.has(path) and self[path] != 0

    def is_changed(self, path: str) -> bool:
        """Whether somebody asked for another value than the declared default."""
        return self[path] is not ABSENT and self[path] != self._declared.get(path, ABSENT)
