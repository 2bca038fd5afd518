"""Loss and gradient of one optimizer batch, whatever its cut into micro-batches and ranks.

Knows which samples need which forward pass and in which order; does not know optimizers, schedules or steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asynctensorrlhf.interfaces import Loss
from asynctensorrlhf.losses.aggregation import count_tokens_and_sequences
from asynctensorrlhf.losses.value import clipped_value_loss
from asynctensorrlhf.policy.policy import Policy, TokenScores
from asynctensorrlhf.trainer.parts import Part, Parts
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.trainer.tally import Tally
from asynctensorrlhf.types import BatchPlan, LossInputs, LossOutput


@dataclass(frozen=True)
class ValueLoss:
    """How the value head is trained; see `clipped_value_loss`."""

    clip_eps: float | None


@dataclass(frozen=True)
class _Batch:
    """One optimizer batch: denominators over all of it, on every rank, and what the loss decided over it."""

    step: StepBatch
    num_tokens: Tensor
    num_sequences: Tensor
    plan: BatchPlan | None = None


class LossPass:
    """Adds the gradient of optimizer batches to the weights' `.grad`; of this rank's share only.

    Args:
        parts: cuts batches for this rank.
        policy: what is trained.
        loss: of the policy.
        value_loss: of its value head; None without one.
    """

    def __init__(self, *, parts: Parts, policy: Policy, loss: Loss, value_loss: ValueLoss | None) -> None:
        self._parts, self._policy = parts, policy
        self._loss, self._value_loss = loss, value_loss

    def __call__(
        self,
        step_batch: StepBatch,
        samples: Sequence[int],
        *,
        live: Sequence[int],
        silent: Sequence[int],
        trains_policy: bool = True,
    ) -> Tally:
        """Run one optimizer batch.

        Args:
            step_batch: of the step.
            samples: the optimizer batch: every denominator counts them all.
            live: those that get a forward and a backward pass.
            silent: those that only get a forward pass.
            trains_policy: false: only the value head gets a gradient.

        Returns:
            This rank's share of the metrics.
        """
        parts = self._parts.of(step_batch, live, has_gradient=True)
        reuses_graph = self._parts.num_ranks == 1 and len(parts) == 1
        parts += self._parts.of(step_batch, silent, has_gradient=False)
        self._score([part for part in parts if not part.has_gradient])
        over = self._over(step_batch, samples, parts, reuses_graph=reuses_graph)
        tally = Tally()
        for part in parts:
            with torch.set_grad_enabled(part.has_gradient):
                scores = part.scores or self._scores(part)
                output = self._loss(_inputs(over, part, scores))
                value_output = self._of_values(over, part, scores)
            if part.has_gradient:
                policy_loss = output.loss if trains_policy else output.loss.detach()
                (policy_loss + value_output.loss).backward()
            tally.add(output, {**value_output.metrics, **_own_metrics(scores.entropy, part, over)})
            part.scores = None
        if not parts:
            # every rank must know the names of the metrics
            tally.add(self._loss(_nothing(over)), self._no_metrics(over))
        if over.plan is not None and self._parts.rank == 0:
            tally.add_sums(over.plan.metrics)
        elif over.plan is not None:
            tally.add_sums({name: torch.zeros_like(value) for name, value in over.plan.metrics.items()})
        return tally

    def _scores(self, part: Part) -> TokenScores:
        needs_entropy = part.has_gradient and "entropy" in self._loss.needs
        return self._policy.logprobs(part.batch, entropy_gradient=needs_entropy)

    def _score(self, parts: Sequence[Part]) -> None:
        with torch.no_grad():
            for part in parts:
                part.scores = self._policy.logprobs(part.batch)

    def _of_values(self, over: _Batch, part: Part, scores: TokenScores) -> LossOutput:
        old, returns = part.cut_or_none(over.step.values), part.cut_or_none(over.step.returns)
        if self._value_loss is None or scores.values is None or old is None or returns is None:
            return LossOutput(torch.zeros((), device=scores.logprobs.device))
        return clipped_value_loss(
            scores.values,
            old,
            returns,
            part.batch.loss_mask,
            clip_eps=self._value_loss.clip_eps,
            global_num_tokens=over.num_tokens,
        )

    def _over(self, step_batch: StepBatch, samples: Sequence[int], parts: list[Part], *, reuses_graph: bool) -> _Batch:
        """Denominators, and the loss's plan: made from one pass over all parts before the first gradient."""
        batch = step_batch.batch
        is_member = torch.zeros(batch.num_samples, dtype=torch.bool, device=batch.loss_mask.device)
        is_member[torch.tensor(samples, device=is_member.device)] = True
        over = _Batch(step_batch, *count_tokens_and_sequences(batch.loss_mask[is_member], self._loss.sequences))
        if "plan" not in self._loss.needs:
            return over
        live = [part for part in parts if part.has_gradient]
        if reuses_graph:
            live[0].scores = self._scores(live[0])
        else:
            self._score(live)
        scores = _assemble(step_batch, parts, self._parts)
        if not reuses_graph:
            for part in live:
                part.scores = None
        whole = Part(torch.arange(batch.num_samples, device=is_member.device), batch, has_gradient=False)
        inputs = replace(_inputs(over, whole, scores), loss_mask=batch.loss_mask & is_member[:, None])
        return replace(over, plan=self._loss.plan(inputs))

    def _no_metrics(self, over: _Batch) -> dict[str, Tensor]:
        names = ["train/entropy", "train/num_micro_batches"]
        if self._value_loss is not None:
            names += ["value/loss", "value/clip_fraction"]
        return {name: torch.zeros((), device=over.num_tokens.device) for name in names}


def _assemble(step_batch: StepBatch, parts: Sequence[Part], ranks: Parts) -> TokenScores:
    """Detached scores of all parts and ranks in the place of their samples; 0 elsewhere."""
    both = torch.zeros(2, *step_batch.batch.completion_ids.shape, device=step_batch.batch.completion_ids.device)
    for part in parts:
        assert part.scores is not None
        part.paste(both[0], part.scores.logprobs.detach())
        part.paste(both[1], part.scores.entropy.detach())
    logprobs, entropy = ranks.sum_over_ranks(both)
    return TokenScores(logprobs, entropy)


def _inputs(over: _Batch, part: Part, scores: TokenScores) -> LossInputs:
    batch, step, plan = part.batch, over.step, over.plan
    return LossInputs(
        policy_logprobs=scores.logprobs,
        behaviour_logprobs=batch.behaviour_logprobs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        global_num_tokens=over.num_tokens,
        global_num_sequences=over.num_sequences,
        proximal_logprobs=part.cut_or_none(step.proximal_logprobs),
        ref_logprobs=part.cut_or_none(step.ref_logprobs),
        entropy=scores.entropy,
        token_versions=batch.token_versions,
        policy_version=step.policy_version,
        kl_scale=step.kl_scale,
        plan=None if plan is None else plan.cut(part.cut),
    )


def _nothing(over: _Batch) -> LossInputs:
    """One masked token."""
    zero = torch.zeros(1, 1, device=over.num_tokens.device)
    masked = torch.zeros_like(zero, dtype=torch.bool)
    return LossInputs(
        policy_logprobs=zero,
        behaviour_logprobs=zero,
        advantages=zero,
        loss_mask=masked,
        global_num_tokens=over.num_tokens,
        global_num_sequences=over.num_sequences,
        proximal_logprobs=zero,
        ref_logprobs=zero,
        entropy=zero,
        token_versions=torch.zeros_like(zero, dtype=torch.int64),
        policy_version=over.step.policy_version,
        plan=None if over.plan is None else over.plan.cut(lambda _: masked),
    )


def _own_metrics(entropy: Tensor, part: Part, over: _Batch) -> Mapping[str, Tensor]:
    mean = torch.where(part.batch.loss_mask, entropy.detach(), 0.0).sum() / over.num_tokens.clamp(min=1)
    return {"train/entropy": mean, "train/num_micro_batches": torch.ones_like(mean)}
