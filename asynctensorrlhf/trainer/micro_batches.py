"""How an optimizer batch is cut: into minibatches, over ranks, into micro-batches.

Knows lengths and groups; does not know what is computed on the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from asynctensorrlhf.types import TrainBatch


class BatchCutter:
    """Cuts one batch into lists of sample indices and makes batches of them.

    The lengths are read from the device once. Every cut is a function of the lengths alone, so that all ranks agree.

    Example:
        >>> cutter = BatchCutter(batch)  # 2 groups of 2 samples; prompts of 3 tokens, completions of 1, 4, 2 and 2
        >>> cutter.micro_batches([0, 1, 2, 3], max_tokens=8, share_prompt=True)
        [[2, 3], [0], [1]]
    """

    def __init__(self, batch: TrainBatch) -> None:
        self._prompts: list[int] = batch.prompt_index.tolist()
        self._prompt_lengths: list[int] = batch.prompt_lengths.tolist()
        self._lengths: list[int] = batch.completion_lengths.tolist()

    def groups(self, samples: Sequence[int]) -> list[list[int]]:
        """`samples` by group; groups in admission order."""
        ordered = sorted(samples, key=lambda sample: (self._prompts[sample], sample))
        return [list(group) for _, group in groupby(ordered, key=lambda sample: self._prompts[sample])]

    def minibatches(self, num_minibatches: int) -> list[list[int]]:
        """Every sample, in up to `num_minibatches` runs of whole groups, in admission order; none is empty."""
        groups = self.groups(range(len(self._lengths)))
        bounds = [index * len(groups) // num_minibatches for index in range(num_minibatches + 1)]
        parts = [groups[start:stop] for start, stop in pairwise(bounds)]
        return [[sample for group in part for sample in group] for part in parts if part]

    def share(self, samples: Sequence[int], *, rank: int, num_ranks: int) -> list[int]:
        """The whole groups of `samples` that are this rank's: the largest first, each to the least loaded rank."""
        groups = self.groups(samples)
        loads, mine = [0] * num_ranks, list[int]()
        for group in sorted(groups, key=self._num_tokens, reverse=True):
            owner = loads.index(min(loads))
            loads[owner] += self._num_tokens(group)
            if owner == rank:
                mine += group
        return sorted(mine)

    def micro_batches(self, samples: Sequence[int], *, max_tokens: int, share_prompt: bool) -> list[list[int]]:
        """`samples` in parts whose padded columns are at most `max_tokens`; a longer sample goes alone.

        Groups of similar length meet, and a group is only split when it is over the budget by itself.

        Args:
            samples: indices, each at most once.
            max_tokens: prompts and completions, each padded to the longest of the part.
            share_prompt: count a prompt once for all its samples of a part; otherwise once for each.
        """
        parts: list[_Part] = []
        for group in sorted(self.groups(samples), key=self._longest):
            whole = self._part(group, share_prompt)
            by_length = sorted(group, key=lambda sample: self._lengths[sample])
            fits = whole.num_columns <= max_tokens
            for piece in [whole] if fits else [self._part([sample], share_prompt) for sample in by_length]:
                joined = parts[-1].joined(piece) if parts else None
                if joined is not None and joined.num_columns <= max_tokens:
                    parts[-1] = joined
                else:
                    parts.append(piece)
        return [part.samples for part in parts]

    def select(self, batch: TrainBatch, samples: Sequence[int]) -> TrainBatch:
        """These samples of the batch that was cut and their prompts, without the columns that only others fill."""
        device = batch.prompt_ids.device
        prompts = sorted({self._prompts[sample] for sample in samples})
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        kept = torch.tensor(prompts, device=device)
        index = torch.tensor(samples, device=device)
        num_tokens = max(self._lengths[sample] for sample in samples)
        return TrainBatch(
            prompt_ids=batch.prompt_ids[kept, : max(self._prompt_lengths[prompt] for prompt in prompts)],
            prompt_lengths=batch.prompt_lengths[kept],
            prompt_index=torch.tensor([row_of[self._prompts[sample]] for sample in samples], device=device),
            completion_ids=batch.completion_ids[index, :num_tokens],
            completion_lengths=batch.completion_lengths[index],
            behaviour_logprobs=batch.behaviour_logprobs[index, :num_tokens],
            token_versions=batch.token_versions[index, :num_tokens],
            advantages=batch.advantages[index, :num_tokens],
            rewards=batch.rewards[index],
            loss_mask=batch.loss_mask[index, :num_tokens],
            is_truncated=batch.is_truncated[index],
        )

    def _num_tokens(self, group: Sequence[int]) -> int:
        return self._prompt_lengths[self._prompts[group[0]]] + sum(self._lengths[sample] for sample in group)

    def _longest(self, group: Sequence[int]) -> tuple[int, int]:
        return max(self._lengths[sample] for sample in group), self._prompt_lengths[self._prompts[group[0]]]

    def _part(self, samples: list[int], share_prompt: bool) -> _Part:
        """A part of one group."""
        prompt = self._prompts[samples[0]]
        return _Part(
            samples=samples,
            last_prompt=prompt if share_prompt else None,
            num_prompts=1 if share_prompt else len(samples),
            longest_prompt=self._prompt_lengths[prompt],
            longest=max(self._lengths[sample] for sample in samples),
        )


@dataclass(frozen=True)
class _Part:
    """Samples and the size of their padded rectangles; groups join one after the other, so their sizes add up."""

    samples: list[int]
    last_prompt: int | None
    num_prompts: int
    longest_prompt: int
    longest: int

    @property
    def num_columns(self) -> int:
        return self.num_prompts * self.longest_prompt + len(self.samples) * self.longest

    def joined(self, other: _Part) -> _Part:
        shares_prompt = other.last_prompt is not None and other.last_prompt == self.last_prompt
        return _Part(
            samples=self.samples + other.samples,
            last_prompt=other.last_prompt,
            num_prompts=self.num_prompts + other.num_prompts - shares_prompt,
            longest_prompt=max(self.longest_prompt, other.longest_prompt),
            longest=max(self.longest, other.longest),
        )
