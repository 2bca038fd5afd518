"""The rule of one key: which values it takes.

Knows the grammar of the brackets that end the comment above a key; does not know where the comments are.

    int | float | bool | str | list | list of int | list of float | mapping | device | one of a, b, c
    then, for numbers, >= x | > x | <= x | < x | in (a, b) | in [a, b) | ...
    then any number of: or null | or WORD
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_HEAD = re.compile(
    r"(?P<kind>list of int|list of float|list of str|list|int|float|bool|str|mapping|device)"
    rf"(?: (?P<sign>>=|>|<=|<) (?P<bound>{_NUMBER})"
    rf"| in (?P<left>[\[(])(?P<low>{_NUMBER}), (?P<high>{_NUMBER})(?P<right>[\])]))?"
)
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_ARTICLES = {"int": "an int", "device": "a device (auto, cpu, mps, cuda, cuda:N)"}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_float(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list_of(is_item: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_float,
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list": lambda value: isinstance(value, list),
    "list of int": _is_list_of(_is_int),
    "list of float": _is_list_of(_is_float),
    "list of str": _is_list_of(lambda value: isinstance(value, str)),
    "mapping": lambda value: isinstance(value, dict),
    "device": lambda value: isinstance(value, str) and _DEVICE.fullmatch(value) is not None,
}


@dataclass(frozen=True)
class Rule:
    """Which values a key takes.

    Attributes:
        text: the rule as it is written; empty: anything.
        kind: a name of the grammar, or empty for a plain choice.
        low: lower bound and whether it is itself allowed.
        high: upper bound, likewise.
        words: strings taken besides.
        is_nullable: whether null is taken besides.
    """

    text: str
    kind: str
    low: tuple[float, bool] = (-math.inf, True)
    high: tuple[float, bool] = (math.inf, True)
    words: tuple[str, ...] = ()
    is_nullable: bool = False

    def allows(self, value: object) -> bool:
        """Whether plain data (no OmegaConf nodes) satisfies the rule."""
        if not self.text or (value is None and self.is_nullable):
            return True
        if isinstance(value, str) and value in self.words:
            return True
        return self.kind in _KINDS and _KINDS[self.kind](value) and self._is_within(value)

    def _is_within(self, value: object) -> bool:
        if not isinstance(value, (int, float)):
            return True
        (low, takes_low), (high, takes_high) = self.low, self.high
        return (low < value or (takes_low and value == low)) and (value < high or (takes_high and value == high))

    @property
    def allowed(self) -> str:
        """What is allowed, to follow `must be`."""
        kind = self.text.split(" ")[0]
        return self.text.replace(kind, _ARTICLES.get(kind, f"a {kind}"), 1) if kind != "one" else self.text


ANYTHING = Rule(text="", kind="")


def parse_rule(text: str) -> Rule | None:
    """The rule that `text` (without its brackets) spells, or None when it spells none."""
    first, *others = text.split(" or ")
    words = tuple(word for word in others if word != "null")
    is_nullable = "null" in others
    if any(" " in word for word in words):
        return None
    if first.startswith("one of "):
        choices = tuple(choice.strip() for choice in first.removeprefix("one of ").split(","))
        return Rule(text=text, kind="", words=choices + words, is_nullable=is_nullable)
    found = _HEAD.fullmatch(first)
    if found is None:
        return None
    low, high = _bounds(found)
    return Rule(text=text, kind=found["kind"], low=low, high=high, words=words, is_nullable=is_nullable)


def _bounds(found: re.Match[str]) -> tuple[tuple[float, bool], tuple[float, bool]]:
    low, high = (-math.inf, True), (math.inf, True)
    if found["left"]:
        return (float(found["low"]), found["left"] == "["), (float(found["high"]), found["right"] == "]")
    if found["sign"] in (">", ">="):
        low = (float(found["bound"]), found["sign"] == ">=")
    elif found["sign"] in ("<", "<="):
        high = (float(found["bound"]), found["sign"] == "<=")
    return low, high


def rule_of_default(value: object) -> Rule:
    """The rule of a key that has none: the type of its default; null takes anything, a float takes an int."""
    kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "mapping"}
    kind = kinds.get(type(value), "")
    return Rule(text=kind, kind=kind)
