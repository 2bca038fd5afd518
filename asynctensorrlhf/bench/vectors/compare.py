"""What a vector expects against what came out.

Knows tolerances, shapes and which keys are documentation; does not know where results come from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from asynctensorrlhf.bench.vectors.fields import is_number, leaves, shape_of, show_place

Results = Mapping[str, Any]
"""Names as under `expected`: tensors, numbers, truth values, lists, or more results."""

TIES = "grad_tie_positions"
_GRADIENT = "grad"
# units in the last place of a float64 by which two exponential functions may differ
_ROUNDING = 4 * 2.0**-52


class Counts(dict[str, int]):
    """Results of which every key must be expected: a count left out is a wrong one."""


@dataclass(frozen=True)
class Tolerance:
    """|result - expected| <= absolute + relative x |expected|."""

    absolute: float
    relative: float

    def allows(self, result: float, expected: float) -> bool:
        """Whether two numbers are equal within it, or within the rounding of a float64 that large."""
        allowed = self.absolute + max(self.relative, _ROUNDING) * abs(expected)
        # a NaN is not
        return abs(result - expected) <= allowed


def differences(expected: Mapping[str, Any], results: Results, tolerance: Tolerance, path: str = "") -> Iterator[str]:
    """Everything under `expected` that `results` does not say, a line each.

    Texts are documentation where no result has their name. Gradients at the places that the results list as
    `grad_tie_positions` are not compared; the list itself is.
    """
    ties = {tuple(place) for place in results.get(TIES, ())}
    for key, value in expected.items():
        name = f"{path}{key}"
        if key in results:
            is_gradient = key.startswith(_GRADIENT) and key != TIES
            yield from _of_value(name, value, results[key], tolerance, ties if is_gradient else ())
        elif not isinstance(value, str):
            yield f"{name} is nothing that this vector can tell"
    if isinstance(results, Counts):
        yield from (f"{path}{key} is missing, got {results[key]}" for key in results if key not in expected)


def _of_value(
    name: str, expected: Any, result: Any, tolerance: Tolerance, ties: Collection[tuple[int, ...]]
) -> Iterator[str]:
    if isinstance(result, Mapping):
        if isinstance(expected, Mapping):
            yield from differences(expected, result, tolerance, f"{name}.")
        else:
            yield f"{name} must be an object, is {_kind(expected)}"
        return
    plain = result.tolist() if isinstance(result, Tensor) else result
    try:
        shape = shape_of(expected)
    except ValueError as error:
        yield f"{name} is {error}"
        return
    if shape != shape_of(plain):
        yield f"{name} has the shape {shape}, got {shape_of(plain)}"
        return
    for (place, one), (_, other) in zip(leaves(expected), leaves(plain), strict=True):
        if place not in ties and not _is_equal(one, other, tolerance):
            yield f"{name}{show_place(place)} is {_show(one)}, got {_show(other)}"


def _is_equal(expected: Any, result: Any, tolerance: Tolerance) -> bool:
    if expected is None:
        # JSON has no infinite number: no bound at all
        return result is None or (is_number(result) and math.isinf(result))
    if isinstance(expected, bool) or isinstance(result, bool):
        return expected is result
    return is_number(expected) and is_number(result) and tolerance.allows(float(result), float(expected))


def _kind(value: Any) -> str:
    return {list: "an array", str: "a text", bool: "a truth value"}.get(type(value), "a number")


def _show(value: Any) -> str:
    return repr(value) if not isinstance(value, Mapping) else "an object"
