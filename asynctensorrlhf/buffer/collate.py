"""Groups of unequal lengths to one right-padded batch.

Knows shapes; does not know what is trained on it, nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asynctensorrlhf.types import SampleGroup, TrainBatch


def collate(groups: Sequence[SampleGroup], *, overlong: Literal["keep", "mask", "penalty"] = "keep") -> TrainBatch:
    """The batch of some groups: samples in the order of groups, padded with zeros to the longest of this batch.

    Args:
        groups: at least one; they may differ in size.
        overlong: `mask` leaves samples that the length limit cut out of `loss_mask`; their ids, rewards and
            advantages stay. `penalty` trains them: their rewards were lowered before.

    Returns:
        Tensors on the device of the first sample's ids (prompts are moved there); `behaviour_logprobs`, `advantages`
        and `rewards` float32, ids and versions int64. Each group's advantages are repeated over their completions.

    Raises:
        ValueError: no groups.
    """
    if not groups:
        raise ValueError("collate needs at least one group, got none")
    samples = [sample for group in groups for sample in group.samples]
    device = samples[0].completion_ids.device
    prompt_lengths = torch.tensor([len(group.prompt.prompt_ids) for group in groups], device=device)
    group_sizes = torch.tensor([len(group.samples) for group in groups], device=device)
    completion_lengths = torch.tensor([len(sample.completion_ids) for sample in samples], device=device)
    completion_ids = _pad([sample.completion_ids for sample in samples], device, torch.int64)
    completion_mask = torch.arange(completion_ids.shape[1], device=device) < completion_lengths[:, None]
    advantages = torch.cat([group.advantages.to(device, torch.float32) for group in groups])
    is_truncated = torch.tensor([sample.finish_reason == "length" for sample in samples], device=device)
    is_trained = ~is_truncated if overlong == "mask" else torch.ones_like(is_truncated)
    return TrainBatch(
        prompt_ids=_pad([group.prompt.prompt_ids for group in groups], device, torch.int64),
        prompt_lengths=prompt_lengths,
        prompt_index=torch.arange(len(groups), device=device).repeat_interleave(group_sizes),
        completion_ids=completion_ids,
        completion_lengths=completion_lengths,
        behaviour_logprobs=_pad([sample.behaviour_logprobs for sample in samples], device, torch.float32),
        token_versions=_pad([sample.token_versions for sample in samples], device, torch.int64),
        advantages=torch.where(completion_mask, advantages[:, None], 0.0),
        rewards=torch.cat([group.rewards.to(device, torch.float32) for group in groups]),
        loss_mask=completion_mask & is_trained[:, None],
        is_truncated=is_truncated,
    )


def _pad(rows: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    return pad_sequence([row.to(device, dtype) for row in rows], batch_first=True)
