"""Micro-batches of a step's batch: cut for this rank, scored, and put together again.

Knows rows and ranks; does not know what is computed on a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from asynctensorrlhf.policy.policy import TokenScores
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.types import TrainBatch


@dataclass
class Part:
    """A micro-batch: the rows of the step's batch it holds, and its scores once they are known."""

    rows: Tensor
    batch: TrainBatch
    has_gradient: bool
    scores: TokenScores | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a tensor over the step's samples and tokens."""
        return whole[self.rows, : self.batch.completion_ids.shape[1]]

    def cut_or_none(self, whole: Tensor | None) -> Tensor | None:
        """The same of what may not be there."""
        return None if whole is None else self.cut(whole)

    def paste(self, whole: Tensor, values: Tensor) -> None:
        """The reverse of `cut`, in place."""
        whole[self.rows, : values.shape[1]] = values


class Parts:
    """Cuts batches into the micro-batches of this rank.

    Args:
        accelerator: knows rank and number of ranks.
        max_tokens: see `BatchCutter.micro_batches`, as `share_prompt`.
        share_prompt: see there.
    """

    def __init__(self, *, accelerator: Accelerator, max_tokens: int, share_prompt: bool) -> None:
        self.rank, self.num_ranks = accelerator.process_index, accelerator.num_processes
        self._max_tokens, self._share_prompt = max_tokens, share_prompt

    def of(self, step_batch: StepBatch, samples: Sequence[int], *, has_gradient: bool) -> list[Part]:
        """This rank's share of `samples`."""
        cutter, device = step_batch.cutter, step_batch.batch.prompt_ids.device
        mine = cutter.share(samples, rank=self.rank, num_ranks=self.num_ranks)
        micro_batches = cutter.micro_batches(mine, max_tokens=self._max_tokens, share_prompt=self._share_prompt)
        return [
            Part(torch.tensor(rows, device=device), cutter.select(step_batch.batch, rows), has_gradient)
            for rows in micro_batches
        ]

    def evaluate(
        self,
        step_batch: StepBatch,
        samples: Sequence[int],
        score: Callable[[TrainBatch], Tensor],
        *,
        num_columns: int | None = None,
    ) -> Tensor:
        """`score` of every one of `samples` without gradient, from all ranks on every rank; 0 elsewhere.

        Args:
            step_batch: of the step.
            samples: those that are scored.
            score: one row a sample, at least as many columns as its batch has tokens.
            num_columns: of the result; None: tokens of the step's batch.
        """
        completion_ids = step_batch.batch.completion_ids
        shape = (completion_ids.shape[0], num_columns or completion_ids.shape[1])
        whole = torch.zeros(shape, device=completion_ids.device)
        with torch.no_grad():
            for part in self.of(step_batch, samples, has_gradient=False):
                part.paste(whole, score(part.batch))
        return self.sum_over_ranks(whole)

    def sum_over_ranks(self, whole: Tensor) -> Tensor:
        """What each rank filled in its own rows, filled everywhere; in place."""
        if self.num_ranks > 1:
            torch.distributed.all_reduce(whole)
        return whole
