"""The records that travel between the parts.

Knows what a prompt, a sample, a batch and a report are made of; does not know who makes or uses them.
All tensors are detached, and none has a vocabulary-sized axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class PromptRow:
    """One row of a data source, tokenised once at load.

    Attributes:
        prompt_ids: token ids of the prompt as the model sees them (template and BOS included), on the CPU.
        text: what the ids say, for people.
        columns: every column of the row, for rewards; the answer column holds its exact text.
    """

    prompt_ids: Int[Tensor, " token"]
    text: str
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Ticket:
    """Leave to draw one prompt: `ordinal` counts admissions of this process from 0."""

    ordinal: int
    policy_version: int


@dataclass(frozen=True)
class Prompt:
    """One draw of one prompt row.

    Attributes:
        group_id: index of the draw over the whole run; the same after a resume.
        row_id: the row of the data source it drew.
        prompt_ids: the row's token ids, on the CPU.
        ticket: the admission it was drawn for.
    """

    group_id: int
    row_id: int
    prompt_ids: Int[Tensor, " token"]
    ticket: Ticket


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt and how many completions of it to sample."""

    prompt: Prompt
    num_samples: int


@dataclass(frozen=True)
class Sample:
    """One finished completion.

    Attributes:
        prompt: the draw it completes.
        sample_index: place within the group, from 0.
        completion_ids: sampled ids, the stop token included when one was sampled.
        behaviour_logprobs: log-probability under the sampler of each completion id, nats, float32.
        token_versions: policy version whose weights produced each id.
        finish_reason: `stop` when a stop token was sampled, `length` when the limit cut it.
    """

    prompt: Prompt
    sample_index: int
    completion_ids: Int[Tensor, " token"]
    behaviour_logprobs: Float[Tensor, " token"]
    token_versions: Int[Tensor, " token"]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        lengths = (len(self.completion_ids), len(self.behaviour_logprobs), len(self.token_versions))
        if min(lengths) != max(lengths) or not lengths[0]:
            raise ValueError(
                f"sample {self.sample_index} of group {self.prompt.group_id}: completion_ids, behaviour_logprobs and "
                f"token_versions must have one common length of at least 1, got {lengths}"
            )


@dataclass(frozen=True)
class SampleGroup:
    """All samples of one draw, scored.

    Attributes:
        prompt: the draw.
        samples: ordered by `sample_index`.
        rewards: one per sample, NaN where the reward gave no score.
        advantages: one per sample, computed once from the complete group.
        min_policy_version: oldest version that produced any token of the group.
        max_policy_version: newest one.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    rewards: Float[Tensor, " sample"]
    advantages: Float[Tensor, " sample"]
    min_policy_version: int
    max_policy_version: int


@dataclass(frozen=True)
class RewardInputs:
    """What a reward sees of a batch of completions, on their device.

    Attributes:
        completion_ids: right-padded sampled ids.
        completion_mask: True on sampled ids, built from lengths.
        row_ids: the data row of each sample.
        answers: columns made by `Reward.encode`, already gathered: first axis is the sample.
    """

    completion_ids: Int[Tensor, "sample token"]
    completion_mask: Bool[Tensor, "sample token"]
    row_ids: Int[Tensor, " sample"]
    answers: Mapping[str, Tensor]


@dataclass(frozen=True)
class TrainBatch:
    """Groups collated for the trainer, in admission order; prompts are stored once.

    Attributes:
        prompt_ids: right-padded prompts, one row per group.
        prompt_lengths: their lengths.
        prompt_index: row of `prompt_ids` that each sample completes.
        completion_ids: right-padded sampled ids.
        completion_lengths: their lengths, each at least 1.
        behaviour_logprobs: zero on padding.
        token_versions: policy version of each sampled id, zero on padding.
        advantages: per token; constant over a sample for group-relative advantages.
        rewards: per sample, NaN = no score.
        loss_mask: True on the tokens that are trained.
        is_truncated: samples that the length limit cut.
    """

    prompt_ids: Int[Tensor, "prompt prompt_token"]
    prompt_lengths: Int[Tensor, " prompt"]
    prompt_index: Int[Tensor, " sample"]
    completion_ids: Int[Tensor, "sample token"]
    completion_lengths: Int[Tensor, " sample"]
    behaviour_logprobs: Float[Tensor, "sample token"]
    token_versions: Int[Tensor, "sample token"]
    advantages: Float[Tensor, "sample token"]
    rewards: Float[Tensor, " sample"]
    loss_mask: Bool[Tensor, "sample token"]
    is_truncated: Bool[Tensor, " sample"]

    @property
    def num_samples(self) -> int:
        """Rows of `completion_ids`."""
        return self.completion_ids.shape[0]

    @property
    def completion_mask(self) -> Bool[Tensor, "sample token"]:
        """True on sampled tokens."""
        positions = torch.arange(self.completion_ids.shape[1], device=self.completion_ids.device)
        return positions < self.completion_lengths[:, None]


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch; denominators cover the whole optimizer batch, all micro-batches and ranks.

    Attributes:
        policy_logprobs: log pi_theta, carries the gradient; nats.
        behaviour_logprobs: log pi of the sampler.
        advantages: per token, detached, reward units.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        global_num_tokens: trained tokens of the optimizer batch.
        global_num_sequences: its sequences, as the loss's `sequences` counts them.
        proximal_logprobs: log pi at the start of the step; None: the step has one update, so it is the policy itself.
        ref_logprobs: log pi of the frozen reference, when the loss needs it.
        entropy: of the distribution of each token, nats; carries a gradient when the loss needs it.
        token_versions: policy version that sampled each token.
        policy_version: version of the weights at the start of the step.
        kl_scale: what the adaptive controller multiplies every KL coefficient by.
        plan: what `Loss.plan` returned for the optimizer batch, cut to these tokens; None: these are the whole batch.
    """

    policy_logprobs: Float[Tensor, "sample token"]
    behaviour_logprobs: Float[Tensor, "sample token"]
    advantages: Float[Tensor, "sample token"]
    loss_mask: Bool[Tensor, "sample token"]
    global_num_tokens: Tensor | float
    global_num_sequences: Tensor | float
    proximal_logprobs: Float[Tensor, "sample token"] | None = None
    ref_logprobs: Float[Tensor, "sample token"] | None = None
    entropy: Float[Tensor, "sample token"] | None = None
    token_versions: Int[Tensor, "sample token"] | None = None
    policy_version: int | None = None
    kl_scale: float = 1.0
    plan: BatchPlan | None = None


@dataclass(frozen=True)
class BatchPlan:
    """What a loss decides once over the whole optimizer batch: a mask, and bounds; constants.

    Attributes:
        keep_mask: trained tokens that stay in the loss.
        num_kept: how many of the optimizer batch stay.
        clip_eps_low: lower clip radius found for this batch, scalar; read with `clip_mask`.
        clip_eps_high: upper one.
        clip_mask: tokens that they clip, decided here and not where micro-batches round differently; None: no radii
            were found, the loss has its own.
        metrics: of the whole batch, logged once.
    """

    keep_mask: Bool[Tensor, "sample token"]
    num_kept: Int[Tensor, ""]
    clip_eps_low: Tensor | float = 0.0
    clip_eps_high: Tensor | float = 0.0
    clip_mask: Bool[Tensor, "sample token"] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def cut(self, cut: Callable[[Tensor], Tensor]) -> BatchPlan:
        """The same plan for a part of the tokens."""
        clip_mask = None if self.clip_mask is None else cut(self.clip_mask)
        return replace(self, keep_mask=cut(self.keep_mask), clip_mask=clip_mask)


@dataclass(frozen=True)
class LossOutput:
    """A loss to minimise and what to log of it.

    Attributes:
        loss: scalar; the sum over micro-batches and ranks is the loss of the optimizer batch.
        metrics: scalars already divided by the global denominators: add them over micro-batches and ranks.
        maxima: scalars of which the largest counts.
        minima: scalars of which the smallest counts.
    """

    loss: Float[Tensor, ""]
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    minima: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class AdvantageInputs:
    """What an advantage sees of one step's batch, all ranks together; every tensor is detached.

    Attributes:
        group_advantages: what the advantage returned for each complete group, per token; 0 where nothing was sampled.
        rewards: NaN = no score.
        loss_mask: True on the tokens that are trained; other positions may hold anything, NaN included.
        group_index: which samples belong to one group: samples of a group have one number.
        is_truncated: samples that the length limit cut.
        proximal_logprobs: log pi at the start of the step, nats; given when the advantage needs it.
        ref_logprobs: log pi of the frozen reference, nats; likewise.
        values: value head's estimate before each token, and after the last one, at index `length`; likewise.
        kl_scale: what the adaptive controller multiplies every KL coefficient by.
    """

    group_advantages: Float[Tensor, "sample token"]
    rewards: Float[Tensor, " sample"]
    loss_mask: Bool[Tensor, "sample token"]
    group_index: Int[Tensor, " sample"]
    is_truncated: Bool[Tensor, " sample"]
    proximal_logprobs: Float[Tensor, "sample token"] | None = None
    ref_logprobs: Float[Tensor, "sample token"] | None = None
    values: Float[Tensor, "sample state"] | None = None
    kl_scale: float = 1.0


@dataclass(frozen=True)
class AdvantageOutput:
    """Advantages of a step's batch.

    Attributes:
        advantages: per token, reward units; 0 where not trained.
        returns: what the value head is trained to predict, 0 where not trained; None without a value head.
        metrics: scalars of the whole batch.
    """

    advantages: Float[Tensor, "sample token"]
    returns: Float[Tensor, "sample token"] | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What one trainer step did: `metrics` are plain numbers named `area/name_unit`."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class WeightSnapshot:
    """Named weights of one policy version; never written again once published."""

    policy_version: int
    tensors: Mapping[str, Tensor]
