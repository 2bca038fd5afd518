"""A vector's config and inputs: typed, of the right shape, and with a record of what was read.

Knows names, types and shapes; does not know what the numbers are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.types import LossInputs

T = TypeVar("T")


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shape_of(value: Any) -> tuple[int, ...]:
    """Shape of nested lists; () of anything else.

    Raises:
        ValueError: lists beside each other differ in shape.
    """
    if not isinstance(value, list):
        return ()
    shapes = [shape_of(part) for part in value]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"ragged: parts of the shapes {', '.join(map(str, dict.fromkeys(shapes)))} beside each other")
    return (len(value), *(shapes[0] if shapes else ()))


def leaves(value: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What nested lists hold, with its place."""
    if not isinstance(value, list):
        yield (), value
        return
    for index, part in enumerate(value):
        for place, leaf in leaves(part):
            yield (index, *place), leaf


class Fields:
    """One object of a vector; remembers which of its keys were read.

    Args:
        path: where it stands in the vector, for messages.
        values: its content.
    """

    def __init__(self, path: str, values: Any) -> None:
        if not isinstance(values, dict):
            raise ValueError(f"{path} must be an object, got {type(values).__name__}")
        self._path, self._values = path, values
        self._read: set[str] = set()
        self._children: dict[str, Fields] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def number(self, key: str) -> float:
        """A number."""
        value = self._get(key)
        if not is_number(value):
            raise ValueError(f"{self._path}.{key} must be a number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number; None where it is null or absent."""
        if self._values.get(key) is None:
            self._read.add(key)
            return None
        return self.number(key)

    def integer(self, key: str) -> int:
        """A whole number, however it is written."""
        value = self.number(key)
        if value != int(value):
            raise ValueError(f"{self._path}.{key} must be a whole number, got {value}")
        return int(value)

    def range(self, key: str) -> tuple[float, float]:
        """A lower and an upper bound."""
        value = self._get(key)
        if not isinstance(value, list) or len(value) != 2 or not all(map(is_number, value)):
            raise ValueError(f"{self._path}.{key} must be [low, high], got {value!r}")
        return float(value[0]), float(value[1])

    def choice(self, key: str, meanings: Mapping[str, T]) -> T:
        """What a word stands for."""
        value = self._get(key)
        if not isinstance(value, str) or value not in meanings:
            raise ValueError(f"{self._path}.{key} must be one of {', '.join(meanings)}, got {value!r}")
        return meanings[value]

    def array(self, key: str) -> list[Any]:
        """A list of anything."""
        value = self._get(key)
        if not isinstance(value, list):
            raise ValueError(f"{self._path}.{key} must be an array, got {type(value).__name__}")
        return value

    def skip_text(self, key: str) -> None:
        """Documentation: a text that means nothing to the arithmetic."""
        if not isinstance(self._get(key), str):
            raise ValueError(f"{self._path}.{key} must be a text")

    def child(self, key: str) -> Fields:
        """An object inside; its own keys must be read, too."""
        if key not in self._children:
            self._children[key] = Fields(f"{self._path}.{key}", self._get(key))
        return self._children[key]

    def tensor(self, key: str, *, num_axes: int, dtype: torch.dtype) -> Tensor:
        """Numbers of a known number of axes, none of them empty."""
        value = self._get(key)
        try:
            shape = shape_of(value)
        except ValueError as error:
            raise ValueError(f"{self._path}.{key} is {error}") from error
        if len(shape) != num_axes or 0 in shape:
            raise ValueError(f"{self._path}.{key} must have {num_axes} axes, none empty, got the shape {shape}")
        for place, leaf in leaves(value):
            if not is_number(leaf):
                raise ValueError(f"{self._path}.{key}{show_place(place)} must be a number, got {leaf!r}")
        return torch.tensor(value, dtype=dtype)

    def unread(self) -> Iterator[str]:
        """Paths of the keys that nothing asked for."""
        for key in self._values:
            if key in self._children:
                yield from self._children[key].unread()
            elif key not in self._read:
                yield f"{self._path}.{key}"

    def _get(self, key: str) -> Any:
        if key not in self._values:
            raise ValueError(f"{self._path}.{key} is missing")
        self._read.add(key)
        return self._values[key]


def show_place(place: Sequence[int]) -> str:
    """Indices as they are written behind a name."""
    return "".join(f"[{index}]" for index in place)


@dataclass(frozen=True)
class Vector:
    """What a runner sees of one vector.

    Attributes:
        config: constants.
        inputs: arrays.
        expected: the results to compare with; runners only look at the names in it.
        dtype: of the arithmetic, float32 or float64.
    """

    config: Fields
    inputs: Fields
    expected: Mapping[str, Any]
    dtype: torch.dtype

    @cached_property
    def mask(self) -> Bool[Tensor, "sample token"]:
        """The trained tokens."""
        mask = self.inputs.tensor("mask", num_axes=2, dtype=torch.float64)
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("inputs.mask must hold 0 and 1 only")
        return mask.bool()

    def tokens(self, key: str) -> Float[Tensor, "sample token"]:
        """One number per token of the mask."""
        values = self.inputs.tensor(key, num_axes=2, dtype=self.dtype)
        if values.shape != self.mask.shape:
            raise ValueError(f"inputs.{key} has the shape {tuple(values.shape)}, inputs.mask {tuple(self.mask.shape)}")
        return values

    def samples(self, key: str, num_samples: int | None = None) -> Float[Tensor, " sample"]:
        """One number per sample."""
        return _counted(key, self.inputs.tensor(key, num_axes=1, dtype=self.dtype), num_samples)

    def ids(self, key: str, num_samples: int) -> Int[Tensor, " sample"]:
        """One whole number per sample."""
        values = _counted(key, self.inputs.tensor(key, num_axes=1, dtype=torch.float64), num_samples)
        if (values != values.round()).any():
            raise ValueError(f"inputs.{key} must hold whole numbers")
        return values.long()

    def live(self, values: Tensor) -> Float[Tensor, "sample token"]:
        """Results per token as the file has them: numbers, 0 where masked."""
        return torch.where(self.mask, values.to(self.dtype), 0.0)

    def names(self, key: str) -> list[str]:
        """Names of the results below one key of `expected`."""
        below = self.expected.get(key, {})
        if not isinstance(below, dict):
            raise ValueError(f"expected.{key} must be an object, got {type(below).__name__}")
        return list(below)

    def batch(
        self,
        policy: str,
        behaviour: str,
        *,
        advantages: Tensor | None = None,
        **others: Any,
    ) -> LossInputs:
        """Inputs of a loss whose batch is the whole vector; the advantages are those of the vector by default."""
        return whole_batch(
            self.tokens(policy),
            self.tokens(behaviour),
            self.tokens("advantages") if advantages is None else advantages,
            self.mask,
            **others,
        )


def _counted(key: str, values: Tensor, num_samples: int | None) -> Tensor:
    if num_samples is not None and len(values) != num_samples:
        raise ValueError(f"inputs.{key} has {len(values)} values for {num_samples} samples")
    return values
