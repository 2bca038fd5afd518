"""What the loss and the advantage ask about a step's tokens before the first update: one pass for each answer.

Knows who answers (the policy itself, the frozen reference, the value head); does not know what the answers are for.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from asynctensorrlhf.interfaces import Advantage
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.trainer.parts import Parts
from asynctensorrlhf.trainer.step_batch import StepBatch
from asynctensorrlhf.types import AdvantageOutput


class Annotator:
    """Fills in `proximal_logprobs`, `ref_logprobs` and `values` of a step's batch, and then its advantages.

    Args:
        parts: cuts batches for this rank.
        policy: the trained one, at the start of the step.
        reference: the frozen one; None when `needs` does not hold `ref_logprobs`.
        advantage: of whole batches.
        needs: which of the three somebody reads.
    """

    def __init__(
        self,
        *,
        parts: Parts,
        policy: Policy,
        reference: Policy | None,
        advantage: Advantage,
        needs: Collection[str],
    ) -> None:
        if "ref_logprobs" in needs and reference is None:
            raise ValueError("loss.kl_coef or advantage.kl_coef needs a reference policy, got none")
        self._parts, self._policy, self._reference = parts, policy, reference
        self._advantage, self._needs = advantage, frozenset(needs)

    def __call__(self, step_batch: StepBatch) -> AdvantageOutput:
        """Annotate, set the advantages, and return what they came with."""
        trained = step_batch.trained(range(step_batch.num_samples))
        if "proximal_logprobs" in self._needs:
            step_batch.proximal_logprobs = self._logprobs(step_batch, trained, self._policy)
        if "ref_logprobs" in self._needs and self._reference is not None:
            step_batch.ref_logprobs = self._logprobs(step_batch, trained, self._reference)
        if "values" in self._needs:
            step_batch.values = self._parts.evaluate(
                step_batch,
                trained,
                self._policy.state_values,
                num_columns=step_batch.batch.completion_ids.shape[1] + 1,
            )
        output = self._advantage.over_batch(step_batch.advantage_inputs())
        step_batch.take_advantages(output)
        return output

    def _logprobs(self, step_batch: StepBatch, samples: list[int], policy: Policy) -> Tensor:
        return self._parts.evaluate(step_batch, samples, lambda batch: policy.logprobs(batch).logprobs)
