"""JSON as the standard has it.

Knows what Python's reader lets through and the standard does not; does not know vectors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# beyond it, neighbouring whole numbers are one float64
LARGEST_WHOLE = 2**53


def read_strictly(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ValueError: not UTF-8, not JSON, a NaN or infinite number, a number too large for float64, or a key given twice.
        OSError: the file can't be read.
    """
    try:
        return json.loads(
            path.read_text(encoding="utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_exact,
            object_pairs_hook=_once,
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is too large for a float64")
    return number


def _exact(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > LARGEST_WHOLE:
        raise ValueError(f"{text[:40]} is too large to be exact in a float64")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"the key {twice[0]!r} is given twice in one object")
    return dict(pairs)
