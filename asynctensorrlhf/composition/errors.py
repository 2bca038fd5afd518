"""The one-line error of a bad config, and the nearest name to a mistyped one.

Knows how a complaint is worded; does not know what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

MAX_VALUE_CHARS = 80
# Between a name that is equal and one that merely looks alike: `steps` means `num_steps` more than `eps`.
SHARES_WORDS = 0.9
# A misspelt key is meant where it was written, unless the very name is elsewhere.
IS_SIBLING = 0.1


class ConfigError(ValueError):
    """A config that cannot run. Its text is one line: key, value, what is allowed, and the fix when it is known."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def show_value(value: object) -> str:
    """A value as it is written on a command line, cut to a readable length."""
    names = {None: "null", True: "true", False: "false"}
    text = names[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "..."


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.55) -> str | None:
    """The candidate whose last part is closest to that of `name`, siblings first; None when nothing is close."""
    above, _, last = name.rpartition(".")

    def closeness(candidate: str) -> float:
        other_above, _, other = candidate.rpartition(".")
        has_all_words = set(last.split("_")) < set(other.split("_"))
        likeness = SHARES_WORDS if has_all_words else SequenceMatcher(None, last, other).ratio()
        return likeness + (IS_SIBLING if above and above == other_above else 0.0)

    best = max(candidates, key=closeness, default=None)
    return best if best is not None and closeness(best) >= cutoff else None


def suggestion(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` or nothing."""
    found = nearest(name, candidates)
    return f"; did you mean {found}?" if found is not None else ""
