"""Accuracy on held-out prompts: the same draws and the same random numbers every time.

Knows prompts and scores; gets sampling callables and never sees an engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from asynctensorrlhf.interfaces import PromptSource
from asynctensorrlhf.types import GenerationRequest, Prompt, Sample, Ticket

SampleFn = Callable[[Sequence[GenerationRequest]], list[Sample]]


@dataclass(frozen=True)
class Accuracy:
    """Mean reward over the held-out draws: sampled at the training temperature, and greedy."""

    sampled: float
    greedy: float


@dataclass(frozen=True)
class Evaluator:
    """Completes every held-out draw, sampled and greedy, and averages the reward.

    Draws of one row share its prefill, and its greedy completion counts once for each of them.

    Attributes:
        heldout: the prompts, drawn `heldout.num_draws` times.
        sample: completions drawn at the training temperature.
        sample_greedy: completions of the most likely tokens.
        score: one reward per sample; NaN is left out of the mean.
    """

    heldout: PromptSource
    sample: SampleFn
    sample_greedy: SampleFn
    score: Callable[[Sequence[Sample]], Tensor]

    def __call__(self) -> Accuracy:
        """Run both evaluations."""
        assert self.heldout.num_draws is not None, "a held-out set is finite"
        counts = Counter(self.heldout.row_id(draw) for draw in range(self.heldout.num_draws))
        prompts = [Prompt(row, row, self.heldout.rows[row].prompt_ids, Ticket(row, 0)) for row in counts]
        requests = [GenerationRequest(prompt, counts[prompt.row_id]) for prompt in prompts]
        sampled = self.score(self.sample(requests))
        greedy = self.score(self.sample_greedy([GenerationRequest(prompt, 1) for prompt in prompts]))
        repeats = torch.tensor(list(counts.values()), device=greedy.device)
        return Accuracy(sampled=float(sampled.nanmean()), greedy=float(greedy.repeat_interleave(repeats).nanmean()))
