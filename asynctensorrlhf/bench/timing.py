"""Time of one thing against another on a machine whose speed changes.

Knows clocks and pairs; does not know what it times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(frozen=True)
class Pairs:
    """Times of two things, taken one right after the other.

    Attributes:
        baseline_s: median of the baseline, seconds.
        other_s: median of the other, seconds.
        ratio: median over pairs of other / baseline; what slows both of a pair does not change it.
    """

    baseline_s: float
    other_s: float
    ratio: float


def time_pairs(
    baseline: Callable[[], object], other: Callable[[], object], *, num_pairs: int, device: torch.device
) -> Pairs:
    """Run each once unmeasured, then in pairs that begin with the one and the other in turn."""
    baseline()
    other()
    pairs = []
    for number in range(num_pairs):
        if number % 2:
            second, first = seconds(other, device), seconds(baseline, device)
        else:
            first, second = seconds(baseline, device), seconds(other, device)
        pairs.append((first, second))
    return Pairs(
        baseline_s=median(first for first, _ in pairs),
        other_s=median(second for _, second in pairs),
        ratio=median(second / first for first, second in pairs),
    )


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """How long one call takes, until the device has done it."""
    _wait(device)
    start = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
