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
from asynctensorrlhf.types import AdvantageInputs, AdvantageOutput, TrainBatch


class StepBatch:
    """The batch on the trainer's device, its facts read once, and what the step finds out about its tokens.

    Attributes:
        batch: every tensor on one device.
        cutter: of that batch.
        policy_version: of the weights at the start of the step.
        kl_scale: what KL coefficients are multiplied by in this step.
        proximal_logprobs: log pi at the start of the step, when somebody needs it; so the others.
        ref_logprobs: log pi of the frozen reference.
        values: the value head's estimates at the start of the step, one column more than tokens.
        returns: what it should have said.
    """

    def __init__(
        self, batch: TrainBatch, device: torch.device, *, policy_version: int = 0, kl_scale: float = 1.0
    ) -> None:
        tensors = {field.name: getattr(batch, field.name).to(device) for field in dataclasses.fields(batch)}
        self.batch = TrainBatch(**tensors)
        self.cutter = BatchCutter(self.batch)
        self.policy_version, self.kl_scale = policy_version, kl_scale
        self.proximal_logprobs: Float[Tensor, "sample token"] | None = None
        self.ref_logprobs: Float[Tensor, "sample token"] | None = None
        self.values: Float[Tensor, "sample state"] | None = None
        self.returns: Float[Tensor, "sample token"] | None = None
        facts = torch.stack([self.batch.loss_mask.sum(dim=1).float(), self.batch.rewards.float()])
        num_tokens, self._rewards = facts.tolist()
        self._num_tokens = [int(count) for count in num_tokens]
        self._has_signal = self._read_signal()

    @property
    def num_samples(self) -> int:
        """All of them."""
        return len(self._num_tokens)

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(self._num_tokens)

    def advantage_inputs(self) -> AdvantageInputs:
        """What the batch's advantages are made of."""
        batch = self.batch
        return AdvantageInputs(
            group_advantages=batch.advantages,
            rewards=batch.rewards,
            loss_mask=batch.loss_mask,
            group_index=batch.prompt_index,
            is_truncated=batch.is_truncated,
            proximal_logprobs=self.proximal_logprobs,
            ref_logprobs=self.ref_logprobs,
            values=self.values,
            kl_scale=self.kl_scale,
        )

    def take_advantages(self, output: AdvantageOutput) -> None:
        """Train on these advantages and returns from now on."""
        self.returns = output.returns
        if output.advantages is not self.batch.advantages:
            self.batch = dataclasses.replace(self.batch, advantages=output.advantages)
            self._has_signal = self._read_signal()

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

    def _read_signal(self) -> list[bool]:
        # NaN != 0: an advantage that is not a number is a signal, and stops the update
        signals: list[bool] = ((self.batch.advantages != 0) & self.batch.loss_mask).any(dim=1).tolist()
        return signals
