"""Runs vectors and says what differs.

Knows the file's outline, both precisions and the sentence about a vector; does not know what a vector is about.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asynctensorrlhf.bench.vectors.compare import Tolerance, differences
from asynctensorrlhf.bench.vectors.fields import Fields, Vector, leaves
from asynctensorrlhf.bench.vectors.runners import RUNNERS
from asynctensorrlhf.bench.vectors.strict_json import read_strictly
from asynctensorrlhf.composition.errors import suggestion

SCHEMA_VERSION = 1
NEEDED = ("id", "config", "inputs", "expected")
DOCUMENTATION = ("title", "definition", "sources", "notes")
MAX_SHOWN = 3


@dataclass(frozen=True)
class VectorFile:
    """A file's vectors, unchecked, and how near a result must be.

    Attributes:
        vectors: as they stand in the file, repeated ids included: an id names a runner, each vector counts.
        tolerances: for each precision that the arithmetic is run in.
    """

    vectors: tuple[Any, ...]
    tolerances: Mapping[torch.dtype, Tolerance]


def read_vectors(path: Path) -> VectorFile:
    """The vectors of a file.

    Raises:
        ValueError: not strict JSON, not of this outline, or no vector in it.
        OSError: the file can't be read.
    """
    content = Fields("file", read_strictly(path))
    if content.integer("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"schema_version must be {SCHEMA_VERSION}, got {content.integer('schema_version')}")
    stated = content.child("conventions").child("tolerance")
    tolerances = {
        torch.float64: Tolerance(stated.number("float64"), 0.0),
        torch.float32: Tolerance(stated.number("float32_atol"), stated.number("float32_rtol")),
    }
    vectors = content.array("vectors")
    if not vectors:
        raise ValueError("vectors must hold at least one vector")
    return VectorFile(tuple(vectors), tolerances)


def faults(vector: Any, tolerances: Mapping[torch.dtype, Tolerance]) -> list[str]:
    """Everything that is wrong with a vector or with what the package makes of it; empty when it passes."""
    wrong = _outline_faults(vector)
    if wrong:
        return wrong
    found: list[str] = []
    for dtype, tolerance in tolerances.items():
        name = str(dtype).removeprefix("torch.")
        found += [f"{fault} ({name})" for fault in _run(vector, dtype, tolerance)]
    return found


def verdict(vector_faults: list[str]) -> str:
    """One line: `pass`, or the first faults and how many more there are."""
    if not vector_faults:
        return "pass"
    more = len(vector_faults) - MAX_SHOWN
    shown = [" ".join(fault.split()) for fault in vector_faults[:MAX_SHOWN]]
    return "FAIL: " + "; ".join(shown + ([f"and {more} more"] if more > 0 else []))


def _run(vector: dict[str, Any], dtype: torch.dtype, tolerance: Tolerance) -> Iterator[str]:
    config, inputs = Fields("config", vector["config"]), Fields("inputs", vector["inputs"])
    try:
        with warnings.catch_warnings():
            # a vector may ask for constants that a run is warned of
            warnings.simplefilter("ignore")
            results = RUNNERS[vector["id"]](Vector(config, inputs, vector["expected"], dtype))
        yield from differences(vector["expected"], results, tolerance)
    except Exception as error:  # noqa: BLE001 - whatever a vector's numbers make a function raise is its failure
        yield f"{type(error).__name__}: {error}"
        return
    yield from (f"{path} was not read" for path in (*config.unread(), *inputs.unread()))


def _outline_faults(vector: Any) -> list[str]:
    if not isinstance(vector, dict):
        return [f"a vector must be an object, got {type(vector).__name__}"]
    missing = [f"{key} is missing" for key in NEEDED if key not in vector]
    unknown = [
        f"unknown key {key!r}{suggestion(key, (*NEEDED, *DOCUMENTATION))}"
        for key in vector
        if key not in (*NEEDED, *DOCUMENTATION)
    ]
    if missing or unknown:
        return missing + unknown
    wrong = [f"{key} must be an object" for key in NEEDED[1:] if not isinstance(vector[key], dict)]
    if not isinstance(vector["id"], str) or vector["id"] not in RUNNERS:
        wrong.append(f"unknown id {vector['id']!r}{suggestion(str(vector['id']), RUNNERS)}")
    if not wrong and not any(_is_compared(value) for value in vector["expected"].values()):
        wrong.append("expected holds nothing to compare")
    return wrong


def _is_compared(value: Any) -> bool:
    """Whether a number or a truth value is somewhere in it."""
    if isinstance(value, dict):
        return any(map(_is_compared, value.values()))
    return any(isinstance(leaf, (bool, int, float)) for _, leaf in leaves(value))
