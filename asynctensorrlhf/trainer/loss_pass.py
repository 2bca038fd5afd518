"""Loss and gradient of one optimizer batch, whatever its cut into micro-batches and ranks.

Knows which samples need which forward pass and in which order; does not know optimizers, schedules or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.interfaces import Loss
from asynctensorrlhf.losses.aggregation import count_tokens_and_sequences
from asynctensorrlhf.losses.surrogate import log_ratio
from asynctensorrlhf.policy.policy import Policy, TokenScores
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.trainer.tally import Tally
from asynctensorrlhf.types import LossInputs, TrainBatch


@dataclass
class _Part:
    """A micro-batch: the rows of the step's batch it holds, and its scores once they are known."""

    rows: Tensor
    batch: TrainBatch
    has_gradient: bool
    scores: TokenScores | None = None

    def cut(self, whole: Tensor) -> Tensor:
        """The part of a tensor over the step's samples and tokens."""
        return whole[self.rows, : self.batch.completion_ids.shape[1]]

    def paste(self, whole: Tensor, values: Tensor) -> None:
        """The reverse of `cut`, in place."""
        whole[self.rows, : values.shape[1]] = values


@dataclass(frozen=True)
class _Denominators:
    """Over the whole optimizer batch, on every rank."""

    num_tokens: Tensor
    num_sequences: Tensor
    keep_mask: Bool[Tensor, "sample token"] | None
    num_kept: Tensor | None


class LossPass:
    """Adds the gradient of optimizer batches to the weights' `.grad`; of this rank's share only."""

    def __init__(self, *, accelerator: Accelerator, policy: Policy, loss: Loss, micro_batch_tokens: int) -> None:
        self._policy = policy
        self._loss = loss
        self._max_tokens = micro_batch_tokens
        self._rank, self._num_ranks = accelerator.process_index, accelerator.num_processes

    def logprobs(self, step_batch: StepBatch, samples: Sequence[int]) -> Float[Tensor, "sample token"]:
        """Log-probs of this rank's share under the current weights, without gradient; 0 elsewhere."""
        parts = self._parts(step_batch, samples, has_gradient=False)
        self._score(parts)
        return _assemble(step_batch.batch, parts)

    def __call__(
        self, step_batch: StepBatch, samples: Sequence[int], *, live: Sequence[int], silent: Sequence[int]
    ) -> Tally:
        """Run one optimizer batch.

        Args:
            step_batch: of the step.
            samples: the optimizer batch: every denominator counts them all.
            live: those that get a forward and a backward pass.
            silent: those that only get a forward pass.

        Returns:
            This rank's share of the metrics.
        """
        parts = self._parts(step_batch, live, has_gradient=True)
        reuses_graph = self._num_ranks == 1 and len(parts) == 1
        parts += self._parts(step_batch, silent, has_gradient=False)
        self._score([part for part in parts if not part.has_gradient])
        over = self._denominators(step_batch, samples, parts, reuses_graph=reuses_graph)
        tally = Tally()
        for part in parts:
            with torch.set_grad_enabled(part.has_gradient):
                scores = part.scores or self._policy.logprobs(part.batch)
                output = self._loss(_inputs(step_batch, part, scores, over))
            if part.has_gradient:
                output.loss.backward()
            tally.add(output, _own_metrics(scores.entropy, part.batch.loss_mask, over, num_parts=1))
            part.scores = None
        if not parts:
            # every rank must know the names of the metrics
            inputs = _nothing(over)
            tally.add(self._loss(inputs), _own_metrics(inputs.advantages, inputs.loss_mask, over, num_parts=0))
        return tally

    def _parts(self, step_batch: StepBatch, samples: Sequence[int], *, has_gradient: bool) -> list[_Part]:
        """Micro-batches of this rank's share of `samples`."""
        cutter, device = step_batch.cutter, step_batch.batch.prompt_ids.device
        mine = cutter.share(samples, rank=self._rank, num_ranks=self._num_ranks)
        return [
            _Part(torch.tensor(rows, device=device), cutter.select(rows), has_gradient)
            for rows in cutter.micro_batches(mine, max_tokens=self._max_tokens, share_prompt=self._policy.share_prompt)
        ]

    def _score(self, parts: Sequence[_Part]) -> None:
        with torch.no_grad():
            for part in parts:
                part.scores = self._policy.logprobs(part.batch)

    def _denominators(
        self, step_batch: StepBatch, samples: Sequence[int], parts: list[_Part], *, reuses_graph: bool
    ) -> _Denominators:
        batch = step_batch.batch
        is_member = torch.zeros(batch.num_samples, dtype=torch.bool, device=batch.loss_mask.device)
        is_member[torch.tensor(samples, device=is_member.device)] = True
        num_tokens, num_sequences = count_tokens_and_sequences(batch.loss_mask[is_member], self._loss.sequences)
        if "keep_mask" not in self._loss.needs:
            return _Denominators(num_tokens, num_sequences, None, None)
        live = [part for part in parts if part.has_gradient]
        if reuses_graph:
            live[0].scores = self._policy.logprobs(live[0].batch)
        else:
            self._score(live)
        logprobs = _assemble(batch, parts)
        if self._num_ranks > 1:
            # the mask is over the whole batch, and each rank has scored its own share
            torch.distributed.all_reduce(logprobs)
        mask = batch.loss_mask & is_member[:, None]
        keep = self._loss.keep_mask(log_ratio(logprobs, batch.behaviour_logprobs, mask), batch.advantages, mask)
        if not reuses_graph:
            for part in live:
                part.scores = None
        return _Denominators(num_tokens, num_sequences, keep, (keep & mask).sum())


def _assemble(batch: TrainBatch, parts: Sequence[_Part]) -> Float[Tensor, "sample token"]:
    """Detached log-probs of scored parts in the place of their samples."""
    whole = torch.zeros(batch.completion_ids.shape, device=batch.completion_ids.device)
    for part in parts:
        assert part.scores is not None
        part.paste(whole, part.scores.logprobs.detach())
    return whole


def _inputs(step_batch: StepBatch, part: _Part, scores: TokenScores, over: _Denominators) -> LossInputs:
    proximal, batch = step_batch.proximal_logprobs, part.batch
    return LossInputs(
        policy_logprobs=scores.logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        global_num_tokens=over.num_tokens,
        global_num_sequences=over.num_sequences,
        proximal_logprobs=None if proximal is None else part.cut(proximal),
        keep_mask=None if over.keep_mask is None else part.cut(over.keep_mask),
        global_num_kept_tokens=over.num_kept,
    )


def _nothing(over: _Denominators) -> LossInputs:
    """One masked token."""
    zero, false = torch.zeros(1, 1, device=over.num_tokens.device), torch.zeros(1, 1, dtype=torch.bool)
    masked = false.to(zero.device)
    return LossInputs(
        policy_logprobs=zero,
        behaviour_logprobs=zero,
        advantages=zero,
        loss_mask=masked,
        global_num_tokens=over.num_tokens,
        global_num_sequences=over.num_sequences,
        proximal_logprobs=zero,
        keep_mask=masked,
        global_num_kept_tokens=over.num_kept,
    )


def _own_metrics(entropy: Tensor, loss_mask: Tensor, over: _Denominators, *, num_parts: int) -> dict[str, Tensor]:
    mean = torch.where(loss_mask, entropy, 0.0).sum() / over.num_tokens.clamp(min=1)
    return {"train/entropy": mean, "train/num_micro_batches": torch.full_like(mean, num_parts)}
