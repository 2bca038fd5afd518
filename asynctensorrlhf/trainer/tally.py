"""Sums and maxima of an optimizer batch, over micro-batches and ranks.

Knows how shares of metrics become one number each; does not know what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asynctensorrlhf.types import LossOutput


@dataclass(frozen=True)
class Metrics:
    """Numbers of one optimizer batch; over several, `sums` are averaged, and of extremes the most extreme counts."""

    sums: Mapping[str, float]
    maxima: Mapping[str, float]
    minima: Mapping[str, float]

    @staticmethod
    def over(batches: Sequence[Metrics]) -> dict[str, float]:
        """One number for each name that all batches have."""
        mean = _join([batch.sums for batch in batches], lambda values: sum(values) / len(values))
        extremes = _join([batch.maxima for batch in batches], max) | _join([batch.minima for batch in batches], min)
        # of no token at all there is none
        return mean | {name: value for name, value in extremes.items() if math.isfinite(value)}

    def where(self, is_kept: Callable[[str], bool]) -> Metrics:
        """Only the names that `is_kept` accepts."""
        every = (self.sums, self.maxima, self.minima)
        return Metrics(*({name: value for name, value in each.items() if is_kept(name)} for each in every))


def _join(reports: Sequence[Mapping[str, float]], reduce: Callable[[list[float]], float]) -> dict[str, float]:
    names = [name for name in reports[0] if all(name in report for report in reports)] if reports else []
    return {name: reduce([report[name] for report in reports]) for name in names}


class Tally:
    """Collects `LossOutput`s on the device; nothing is read before `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}

    def add(self, output: LossOutput, sums: Mapping[str, Tensor]) -> None:
        """Add the shares of one micro-batch: those of the loss, and further ones."""
        self.add_sums({"loss/total": output.loss, **output.metrics, **sums})
        _merge(self._maxima, output.maxima, torch.maximum)
        _merge(self._minima, output.minima, torch.minimum)

    def add_sums(self, sums: Mapping[str, Tensor]) -> None:
        """Add shares that no loss output holds."""
        _merge(self._sums, sums, torch.add)

    def read(self, *constants: Tensor) -> tuple[Metrics, list[float]]:
        """The metrics over all ranks, and `constants`, the same on every rank; the one wait for the device."""
        sums, maxima, minima = list(self._sums.values()), list(self._maxima.values()), list(self._minima.values())
        values = torch.stack([value.float() for value in [*sums, *maxima, *minima, *constants]])
        parts = values.split([len(sums), len(maxima), len(minima), len(constants)])
        if torch.distributed.is_initialized():
            operations = torch.distributed.ReduceOp
            for part, operation in zip(parts, (operations.SUM, operations.MAX, operations.MIN), strict=False):
                torch.distributed.all_reduce(part, operation)
        numbers: list[list[float]] = [part.tolist() for part in (values.cpu().split([len(part) for part in parts]))]
        metrics = Metrics(
            sums=dict(zip(self._sums, numbers[0], strict=True)),
            maxima=dict(zip(self._maxima, numbers[1], strict=True)),
            minima=dict(zip(self._minima, numbers[2], strict=True)),
        )
        return metrics, numbers[3]


def _merge(totals: dict[str, Tensor], values: Mapping[str, Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> None:
    for name, value in values.items():
        value = value.detach()
        totals[name] = join(totals[name], value) if name in totals else value
