"""Accuracy on held-out prompts: the same draws and the same random numbers every time.

Knows prompts and scores; gets a sampling callable and never sees an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from asynctensorrlhf.interfaces import PromptSource
from asynctensorrlhf.types import Prompt, Sample, Ticket

SampleFn = Callable[[Sequence[Prompt]], list[Sample]]


@dataclass(frozen=True)
class Accuracy:
    """Mean reward over the held-out draws: sampled at the training temperature, and greedy."""

    sampled: float
    greedy: float


@dataclass(frozen=True)
class Evaluator:
    """Draws every held-out prompt once, sampled and greedy, and averages the reward.

    Attributes:
        heldout: the prompts, drawn `heldout.num_draws` times.
        sample: one completion per prompt, drawn at the training temperature.
        sample_greedy: one completion per prompt, the most likely tokens.
        score: one reward per sample; NaN is left out of the mean.
    """

    heldout: PromptSource
    sample: SampleFn
    sample_greedy: SampleFn
    score: Callable[[Sequence[Sample]], Tensor]

    def __call__(self) -> Accuracy:
        """Run both evaluations."""
        assert self.heldout.num_draws is not None, "a held-out set is finite"
        prompts = [
            Prompt(draw, row_id, self.heldout.rows[row_id].prompt_ids, Ticket(draw, 0))
            for draw in range(self.heldout.num_draws)
            for row_id in [self.heldout.row_id(draw)]
        ]
        return Accuracy(
            sampled=float(self.score(self.sample(prompts)).nanmean()),
            greedy=float(self.score(self.sample_greedy(prompts)).nanmean()),
        )
