"""Sums and maxima of an optimizer batch, over micro-batches and ranks.

Knows how shares of metrics become one number each; does not know what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asynctensorrlhf.types import LossOutput


@dataclass(frozen=True)
class Metrics:
    """Numbers of one optimizer batch; over several, `sums` are averaged and of `maxima` the largest counts."""

    sums: Mapping[str, float]
    maxima: Mapping[str, float]

    @staticmethod
    def over(batches: Sequence[Metrics]) -> dict[str, float]:
        """One number for each name that all batches have."""
        mean = _join([batch.sums for batch in batches], lambda values: sum(values) / len(values))
        return mean | _join([batch.maxima for batch in batches], max)

    def where(self, is_kept: Callable[[str], bool]) -> Metrics:
        """Only the names that `is_kept` accepts."""
        kept = [{name: value for name, value in each.items() if is_kept(name)} for each in (self.sums, self.maxima)]
        return Metrics(*kept)


def _join(reports: Sequence[Mapping[str, float]], reduce: Callable[[list[float]], float]) -> dict[str, float]:
    names = [name for name in reports[0] if all(name in report for report in reports)] if reports else []
    return {name: reduce([report[name] for report in reports]) for name in names}


class Tally:
    """Collects `LossOutput`s on the device; nothing is read before `read`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, output: LossOutput, sums: Mapping[str, Tensor]) -> None:
        """Add the shares of one micro-batch: those of the loss, and further ones."""
        for name, value in {"loss/total": output.loss, **output.metrics, **sums}.items():
            value = value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        for name, value in output.maxima.items():
            value = value.detach()
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def read(self, constant: Tensor) -> tuple[Metrics, float]:
        """The metrics over all ranks, and `constant`, the same on every rank; the one wait for the device."""
        sums, maxima = list(self._sums.values()), list(self._maxima.values())
        values = torch.stack([value.float() for value in [*sums, *maxima, constant]])
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(values[: len(sums)])
            torch.distributed.all_reduce(values[len(sums) :], torch.distributed.ReduceOp.MAX)
        numbers: list[float] = values.tolist()
        metrics = Metrics(
            sums=dict(zip(self._sums, numbers, strict=False)),
            maxima=dict(zip(self._maxima, numbers[len(sums) :], strict=False)),
        )
        return metrics, numbers[-1]
