"""Inputs of an advantage over a batch: what the rollout side makes of rewards, laid out as the trainer sees it."""

from __future__ import annotations

from typing import Any

import torch

from asynctensorrlhf.types import AdvantageInputs


def batch_inputs(rewards, advantage, *, num_tokens=2, loss_mask=None, **others: Any) -> AdvantageInputs:
    """Samples of complete groups [group sample], all of one length; all tokens trained unless a mask says otherwise."""
    num_samples = rewards.numel()
    mask = torch.ones(num_samples, num_tokens, dtype=torch.bool) if loss_mask is None else loss_mask
    fields = {
        "group_advantages": advantage(rewards).flatten()[:, None].expand(mask.shape),
        "rewards": rewards.flatten(),
        "loss_mask": mask,
        "group_index": torch.arange(len(rewards)).repeat_interleave(rewards.shape[1]),
        "is_truncated": torch.zeros(num_samples, dtype=torch.bool),
        **others,
    }
    return AdvantageInputs(**fields)
