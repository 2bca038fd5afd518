"""Optimizer updates from one batch: forward, backward, clip, step, and what is logged of them.

Knows when a step is taken, skipped or refused; does not know where batches come from or who reads the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from accelerate import Accelerator
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from asynctensorrlhf.interfaces import Loss
from asynctensorrlhf.losses.diagnostics import is_exact_without_silent_samples
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.trainer.flat_gradient import FlatGradient
from asynctensorrlhf.trainer.loss_pass import LossPass
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.trainer.tally import Metrics
from asynctensorrlhf.types import TrainBatch


class NonFiniteUpdate(RuntimeError):
    """More updates were skipped for a loss or gradient that is not finite than `trainer.max_skipped_steps` allows."""


@dataclass(frozen=True)
class UpdateReport:
    """What one call of `Update` did.

    Attributes:
        metrics: means over its optimizer updates that were not skipped (maxima: the largest), `area/name_unit`.
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
    grad_norm: float
    was_skipped: bool


class Update:
    """Turns a batch into `epochs_per_step * minibatches_per_step` optimizer updates.

    Every rank is called with the same whole batch and takes its share of the forward passes; each update sums the
    gradient over ranks once, and every denominator counts the whole optimizer batch: neither the micro-batch budget nor
    the number of processes changes the update.

    A *silent* sample has advantage 0 on all its trained tokens and gives no gradient. It stays in every denominator but
    gets a forward pass only where something reads its ratio: a mask over the batch (`keep_mask`), or a full
    diagnostic every `diagnostics_every` steps. Without it only metrics named `loss/...` are exact; the others of the
    loss are left out. An optimizer batch of silent samples changes neither weights nor moments; the schedule goes on.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        policy: Policy,
        loss: Loss,
        optimizer: Optimizer,
        scheduler: LRScheduler,
        max_grad_norm: float | None,
        micro_batch_tokens: int,
        epochs_per_step: int,
        minibatches_per_step: int,
        max_skipped_steps: int,
        diagnostics_every: int,
    ) -> None:
        """Hold the parts; `optimizer` and `scheduler` are plain, not prepared by Accelerate."""
        assert "ref_logprobs" not in loss.needs, "no reference policy here yet"
        self._loss, self._optimizer, self._scheduler = loss, optimizer, scheduler
        self._device = accelerator.device
        self._gradient = FlatGradient(policy.model.parameters())
        self._loss_pass = LossPass(
            accelerator=accelerator, policy=policy, loss=loss, micro_batch_tokens=micro_batch_tokens
        )
        self._max_grad_norm = max_grad_norm
        self._epochs, self._num_minibatches = epochs_per_step, minibatches_per_step
        self._max_skipped, self._diagnostics_every = max_skipped_steps, diagnostics_every
        self._num_updates = self._num_skipped = self._num_without_signal = 0

    def __call__(self, batch: TrainBatch, step: int) -> UpdateReport:
        """Train on `batch`; `step` decides whether a full diagnostic is due and names errors.

        Raises:
            NonFiniteUpdate: too many updates were skipped so far; the weights are those of the last good one.
        """
        step_batch = StepBatch(batch, self._device)
        everything = range(step_batch.num_samples)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        if "proximal_logprobs" in self._loss.needs:
            step_batch.proximal_logprobs = self._loss_pass.logprobs(step_batch, step_batch.trained(everything))
        outcomes = [
            self._update(step_batch, samples, step)
            for _ in range(self._epochs)
            for samples in step_batch.cutter.minibatches(self._num_minibatches)
        ]
        has_signal = bool(step_batch.live(everything))
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
        done = [outcome for outcome in outcomes if not outcome.was_skipped]
        metrics = Metrics.over([outcome.metrics for outcome in done])
        if done:
            metrics["train/grad_norm"] = sum(outcome.grad_norm for outcome in done) / len(done)
        metrics |= {name: float(value) for name, value in counts.items()} | step_batch.reward_metrics()
        num_skipped = sum(outcome.was_skipped for outcome in outcomes)
        return UpdateReport(metrics, has_signal, len(outcomes), num_skipped)

    def _update(self, step_batch: StepBatch, samples: Sequence[int], step: int) -> _Outcome:
        """One optimizer update; every rank takes the same branches."""
        live, silent = step_batch.live(samples), step_batch.trained(step_batch.silent(samples))
        is_due = step % self._diagnostics_every == 0
        is_full = not silent or is_due or (bool(live) and "keep_mask" in self._loss.needs)
        self._gradient.clear()
        tally = self._loss_pass(step_batch, samples, live=live, silent=silent if is_full else [])
        self._gradient.sum_over_ranks()
        metrics, norm = tally.read(self._gradient.norm())
        problem = _non_finite(metrics.sums["loss/total"], norm)
        if not live:
            self._num_without_signal += 1
        elif problem is None:
            self._clip(norm)
        if not live or problem is not None:
            # then the step below changes nothing, and the schedule still follows it in the right order
            self._gradient.detach()
        self._num_updates += 1  # first: an update that breaks off half-way counts, its weights are torn
        self._optimizer.step()
        self._scheduler.step()
        if problem is not None:
            self._skip(problem, step)
        exact = metrics.where(lambda name: is_full or _is_exact_without_silent(name))
        return _Outcome(exact, norm, was_skipped=problem is not None)

    def _clip(self, norm: float) -> None:
        if self._max_grad_norm is not None and norm > self._max_grad_norm:
            self._gradient.scale(self._max_grad_norm / (norm + 1e-6))

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

    def state_dict(self) -> dict[str, int]:
        """Counters of the run, for a checkpoint."""
        return {
            "num_updates": self._num_updates,
            "num_skipped_updates": self._num_skipped,
            "num_updates_without_signal": self._num_without_signal,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from a checkpoint."""
        self._num_updates = state["num_updates"]
        self._num_skipped = state["num_skipped_updates"]
        self._num_without_signal = state["num_updates_without_signal"]


def _is_exact_without_silent(metric: str) -> bool:
    return is_exact_without_silent_samples(metric) or metric == "train/num_micro_batches"


def _non_finite(loss: float, norm: float) -> str | None:
    for name, value in (("the loss", loss), ("the gradient norm", norm)):
        if not math.isfinite(value):
            return f"{name} is {value}"
    return None
