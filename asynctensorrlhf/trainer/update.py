"""Optimizer updates from one batch: annotate, forward, backward, clip, step, and what is logged of them.

Knows when a step is taken, skipped or refused; does not know where batches come from or who reads the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from asynctensorrlhf.interfaces import Advantage, Loss
from asynctensorrlhf.losses.diagnostics import derived, is_exact_without_silent_samples
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.trainer.annotate import Annotator
from asynctensorrlhf.trainer.flat_gradient import FlatGradient
from asynctensorrlhf.trainer.kl_controller import KLController
from asynctensorrlhf.trainer.loss_pass import LossPass, ValueLoss
from asynctensorrlhf.trainer.parts import Parts
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.trainer.tally import Metrics
from asynctensorrlhf.types import TrainBatch


class NonFiniteUpdate(RuntimeError):
    """More updates were skipped for a loss or gradient that is not finite than `trainer.max_skipped_steps` allows."""


@runtime_checkable
class Critic(Protocol):
    """How the value head is trained; the advantage that needs values says it.

    Attributes:
        num_warmup_steps: first steps, in which only the value head learns.
        clip_eps: see `clipped_value_loss`.
        max_grad_norm: of the value head's gradient, apart from the policy's; None: no limit.
    """

    @property
    def num_warmup_steps(self) -> int:
        """See above."""
        ...

    @property
    def clip_eps(self) -> float | None:
        """See above."""
        ...

    @property
    def max_grad_norm(self) -> float | None:
        """See above."""
        ...


@dataclass(frozen=True)
class UpdateReport:
    """What one call of `Update` did.

    Attributes:
        metrics: means over its optimizer updates that were not skipped (extremes: over all), `area/name_unit`.
        has_signal: whether any sample had a gradient to give.
        num_updates: optimizer updates of this call.
        num_skipped: those of them that were skipped as not finite.
    """

    metrics: dict[str, float]
    has_signal: bool
    num_updates: int
    num_skipped: int


@dataclass(frozen=True)
class _Outcome:
    """Of one optimizer update."""

    metrics: Metrics
    was_skipped: bool


@dataclass(frozen=True)
class _Trained:
    """Weights whose gradient has a norm of its own: the policy, or its value head."""

    name: str
    gradient: FlatGradient
    max_norm: float | None

    def clip(self, norm: float) -> None:
        if self.max_norm is not None and norm > self.max_norm:
            self.gradient.scale(self.max_norm / (norm + 1e-6))


class Update:
    """Turns a batch into `epochs_per_step * minibatches_per_step` optimizer updates.

    Every rank is called with the same whole batch and takes its share of the forward passes; each update sums the
    gradient over ranks once, and every denominator counts the whole optimizer batch: neither the micro-batch budget nor
    the number of processes changes the update.

    A *silent* sample has advantage 0 on all its trained tokens and gives no gradient, unless the loss acts without
    advantages (KL, entropy) or a value head learns. It stays in every denominator but gets a forward pass only where
    something reads its ratio: a plan over the batch, or a full diagnostic every `diagnostics_every` steps. Without it
    only metrics named `loss/...` are exact; the others of the loss are left out. An optimizer batch of silent samples
    changes neither weights nor moments; the schedule goes on.

    Args:
        accelerator: device, precision and ranks.
        policy: what is trained, with its value head.
        reference: the frozen policy; None when neither loss nor advantage needs it.
        loss: of the policy.
        advantage: of whole batches.
        critic: how the value head is trained; None without one.
        kl_controller: scales every KL coefficient.
        optimizer: plain, not prepared by Accelerate; so `scheduler`.
        scheduler: of the learning rates, stepped once an update.
        max_grad_norm: of the policy's gradient; None: no limit.
        micro_batch_tokens: padded tokens of a forward pass.
        epochs_per_step: times a batch is trained.
        minibatches_per_step: updates it is split into.
        max_skipped_steps: see `NonFiniteUpdate`.
        diagnostics_every: steps.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        policy: Policy,
        reference: Policy | None,
        loss: Loss,
        advantage: Advantage,
        critic: Critic | None,
        kl_controller: KLController,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        max_grad_norm: float | None,
        micro_batch_tokens: int,
        epochs_per_step: int,
        minibatches_per_step: int,
        max_skipped_steps: int,
        diagnostics_every: int,
    ) -> None:
        self._loss, self._optimizer, self._scheduler = loss, optimizer, scheduler
        self._device, self._kl_controller, self._critic = accelerator.device, kl_controller, critic
        parts = Parts(accelerator=accelerator, max_tokens=micro_batch_tokens, share_prompt=policy.share_prompt)
        value_loss = ValueLoss(critic.clip_eps) if critic is not None else None
        self._loss_pass = LossPass(parts=parts, policy=policy, loss=loss, value_loss=value_loss)
        self._policy_part = _Trained("train/grad_norm", FlatGradient(policy.model.parameters()), max_grad_norm)
        self._trained = [self._policy_part]
        if critic is not None:
            assert policy.value_head is not None, "a critic trains a value head"
            head = FlatGradient(policy.value_head.parameters())
            self._trained.append(_Trained("value/grad_norm", head, critic.max_grad_norm))
        # the one update of a step starts where the step starts: the loss then takes the policy itself
        is_one_update = epochs_per_step * minibatches_per_step == 1
        of_loss = loss.needs - {"proximal_logprobs"} if is_one_update else loss.needs
        self._annotate = Annotator(
            parts=parts, policy=policy, reference=reference, advantage=advantage, needs=of_loss | advantage.needs
        )
        self._always_acts = loss.acts_without_advantage or critic is not None
        self._epochs, self._num_minibatches = epochs_per_step, minibatches_per_step
        self._max_skipped, self._diagnostics_every = max_skipped_steps, diagnostics_every
        self._num_updates = self._num_skipped = self._num_without_signal = 0

    def __call__(self, batch: TrainBatch, step: int, *, policy_version: int = 0) -> UpdateReport:
        """Train on `batch`.

        Args:
            batch: of all ranks.
            step: decides whether a full diagnostic is due and names errors.
            policy_version: of the weights now.

        Raises:
            NonFiniteUpdate: too many updates were skipped so far; the weights are those of the last good one.
        """
        step_batch = StepBatch(batch, self._device, policy_version=policy_version, kl_scale=self._kl_controller.scale)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        advantage = self._annotate(step_batch)
        outcomes = [
            self._update(step_batch, samples, step)
            for _ in range(self._epochs)
            for samples in step_batch.cutter.minibatches(self._num_minibatches)
        ]
        everything = range(step_batch.num_samples)
        has_signal = bool(self._live(step_batch, everything))
        counts = {
            "train/lr": learning_rate,
            "train/num_updates": len(outcomes),
            "train/num_tokens": step_batch.num_tokens,
            "train/num_silent_samples": len(step_batch.silent(everything)),
            "train/has_signal": has_signal,
            "train/num_skipped_updates": self._num_skipped,
            "train/num_updates_without_signal": self._num_without_signal,
        }
        # what a skipped update was made of is not finite, and no number to plot
        metrics = Metrics.over([outcome.metrics for outcome in outcomes if not outcome.was_skipped])
        metrics |= _numbers(counts) | _numbers(advantage.metrics) | step_batch.reward_metrics()
        metrics |= self._kl_controller.follow(metrics, num_samples=step_batch.num_samples)
        num_skipped = sum(outcome.was_skipped for outcome in outcomes)
        return UpdateReport(metrics, has_signal, len(outcomes), num_skipped)

    def _live(self, step_batch: StepBatch, samples: Sequence[int]) -> list[int]:
        return step_batch.trained(samples) if self._always_acts else step_batch.live(samples)

    def _update(self, step_batch: StepBatch, samples: Sequence[int], step: int) -> _Outcome:
        """One optimizer update; every rank takes the same branches."""
        live = self._live(step_batch, samples)
        silent = [] if self._always_acts else step_batch.trained(step_batch.silent(samples))
        is_due = step % self._diagnostics_every == 0
        is_full = not silent or is_due or (bool(live) and "plan" in self._loss.needs)
        trains_policy = self._critic is None or step > self._critic.num_warmup_steps
        for part in self._trained:
            part.gradient.clear()
        tally = self._loss_pass(
            step_batch, samples, live=live, silent=silent if is_full else [], trains_policy=trains_policy
        )
        for part in self._trained:
            part.gradient.sum_over_ranks()
        metrics, norms = tally.read(*(part.gradient.norm() for part in self._trained))
        problem = _non_finite(metrics.sums["loss/total"], norms)
        self._step(norms, is_applied=bool(live) and problem is None, trains_policy=trains_policy)
        if not live:
            self._num_without_signal += 1
        if problem is not None:
            self._skip(problem, step)
        exact = metrics.where(lambda name: is_full or _is_exact_without_silent(name))
        norm_of = {part.name: norm for part, norm in zip(self._trained, norms, strict=True)}
        return _Outcome(replace(exact, sums=derived(exact.sums) | norm_of), was_skipped=problem is not None)

    def _step(self, norms: Sequence[float], *, is_applied: bool, trains_policy: bool) -> None:
        for part, norm in zip(self._trained, norms, strict=True):
            if is_applied and (trains_policy or part is not self._policy_part):
                part.clip(norm)
            else:
                # then the step below changes nothing here, and the schedule still follows it in the right order
                part.gradient.detach()
        self._num_updates += 1  # first: an update that breaks off half-way counts, its weights are torn
        self._optimizer.step()
        self._scheduler.step()

    def _skip(self, problem: str, step: int) -> None:
        self._num_skipped += 1
        if self._num_skipped > self._max_skipped:
            raise NonFiniteUpdate(
                f"step {step}: {problem}; {self._num_skipped} updates skipped so far, "
                f"trainer.max_skipped_steps={self._max_skipped}"
            )

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the run, skipped ones included."""
        return self._num_updates

    def state_dict(self) -> dict[str, int | float]:
        """Counters of the run and the KL controller's place, for a checkpoint."""
        return {
            "num_updates": self._num_updates,
            "num_skipped_updates": self._num_skipped,
            "num_updates_without_signal": self._num_without_signal,
            "kl_scale": self._kl_controller.scale,
        }

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Go on from a checkpoint."""
        self._num_updates = int(state["num_updates"])
        self._num_skipped = int(state["num_skipped_updates"])
        self._num_without_signal = int(state["num_updates_without_signal"])
        self._kl_controller.scale = float(state["kl_scale"])


def _is_exact_without_silent(metric: str) -> bool:
    return is_exact_without_silent_samples(metric) or metric == "train/num_micro_batches"


def _non_finite(loss: float, norms: Sequence[float]) -> str | None:
    for name, value in (("the loss", loss), *(("the gradient norm", norm) for norm in norms)):
        if not math.isfinite(value):
            return f"{name} is {value}"
    return None


def _numbers(values: Mapping[str, float | Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
