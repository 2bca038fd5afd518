"""One trainer step's batch with what the host must know of it: lengths, groups, which samples matter.

Knows a sample's signal from its advantages and mask; does not know the loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.trainer.micro_batches import BatchCutter
from asynctensorrlhf.types import TrainBatch


class StepBatch:
    """The batch on the trainer's device, and its facts read once.

    Attributes:
        batch: every tensor on one device.
        cutter: of that batch.
        proximal_logprobs: log pi at the start of the step, set by the update when its loss needs it.
    """

    def __init__(self, batch: TrainBatch, device: torch.device) -> None:
        tensors = {field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)}
        self.batch = TrainBatch(**tensors)
        self.cutter = BatchCutter(self.batch)
        self.proximal_logprobs: Float[Tensor, "sample token"] | None = None
        mask = self.batch.loss_mask
        # NaN != 0: an advantage that is not a number is a signal, and stops the update
        has_signal = ((self.batch.advantages != 0) & mask).any(dim=1)
        facts = torch.stack([has_signal.float(), mask.sum(dim=1).float(), self.batch.rewards.float()])
        signals, num_tokens, self._rewards = facts.tolist()
        self._has_signal = [bool(signal) for signal in signals]
        self._num_tokens = [int(count) for count in num_tokens]

    @property
    def num_samples(self) -> int:
        """All of them."""
        return len(self._has_signal)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(self._num_tokens)

    def live(self, samples: Sequence[int]) -> list[int]:
        """Those of which some trained token has an advantage other than 0."""
        return [sample for sample in samples if self._has_signal[sample]]

    def silent(self, samples: Sequence[int]) -> list[int]:
        """The others: without influence on the gradient of a policy loss."""
        return [sample for sample in samples if not self._has_signal[sample]]

    def trained(self, samples: Sequence[int]) -> list[int]:
        """Those with a trained token."""
        return [sample for sample in samples if self._num_tokens[sample]]

    def reward_metrics(self) -> dict[str, float]:
        """Mean over scored samples, and the share of groups whose scores are all equal (or absent)."""
        scored = [reward for reward in self._rewards if not math.isnan(reward)]
        groups = self.cutter.groups(range(self.num_samples))
        distinct = [{self._rewards[sample] for sample in group} for group in groups]
        flat = sum(len({reward for reward in rewards if not math.isnan(reward)}) < 2 for rewards in distinct)
        mean = {"reward/mean": sum(scored) / len(scored)} if scored else {}
        return mean | {"reward/zero_variance_fraction": flat / len(groups)}
