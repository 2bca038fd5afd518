"""Staleness told apart from engine mismatch: log-probs recomputed at the version that sampled the tokens.

Knows which samples can be compared and with whose weights; does not know what causes a difference.

    log policy now - log engine  =  (log policy now - log policy then)  +  (log policy then - log engine)
                                        staleness: `drift/...`               mismatch: `mismatch/...`
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from asynctensorrlhf.losses.mismatch import mismatch_metrics
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.trainer.micro_batches import BatchCutter
from asynctensorrlhf.types import TrainBatch, WeightSnapshot

# enough tokens for a mean, few enough for two forward passes that nobody notices
MAX_SAMPLES = 32


class MismatchProbe:
    """Compares a sample of the batch with the weights that made it, every few steps.

    Only completions that one version sampled from start to end can be compared exactly: with `rollout.kv=keep` a cache
    that older weights filled belongs to the sampler, and no version would say the same again.

    Args:
        policy: scores tokens, under its own or other weights.
        snapshot_of: the weights of a version, None when they are gone.
        every: steps between measurements.
        max_tokens: padded tokens of a forward pass.
        device: of the policy.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        snapshot_of: Callable[[int], WeightSnapshot | None],
        every: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._policy, self._snapshot_of = policy, snapshot_of
        self._every, self._max_tokens, self._device = every, max_tokens, device

    def __call__(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Metrics of this step; none when it is not due or no completion can be compared."""
        if step % self._every:
            return {}
        version, samples = _samples_of_one_version(batch)
        snapshot = self._snapshot_of(version) if samples else None
        if snapshot is None:
            return {}
        then, now, engine, mask = self._score(batch, samples, snapshot.tensors)
        drift = {
            name.replace("mismatch/", "drift/"): value
            for name, value in mismatch_metrics(now, then, mask).items()
            if name in ("mismatch/k3", "mismatch/abs_log_ratio_mean", "mismatch/abs_log_ratio_max")
        }
        metrics = mismatch_metrics(then, engine, mask) | drift | {"mismatch/num_tokens": mask.sum()}
        values: list[float] = torch.stack([value.float() for value in metrics.values()]).tolist()
        return dict(zip(metrics, values, strict=True))

    def _score(
        self, batch: TrainBatch, samples: list[int], tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Log-probs then, now and of the engine, and the mask of sampled tokens, for these samples alone."""
        on_device = TrainBatch(
            **{field.name: getattr(batch, field.name).to(self._device) for field in dataclasses.fields(batch)}
        )
        cutter = BatchCutter(on_device)
        part = cutter.select(on_device, samples)
        rows = {sample: row for row, sample in enumerate(samples)}
        then, now = torch.zeros(2, *part.completion_ids.shape, device=self._device)
        for micro_batch in cutter.micro_batches(
            samples, max_tokens=self._max_tokens, share_prompt=self._policy.share_prompt
        ):
            cut = cutter.select(on_device, micro_batch)
            index = torch.tensor([rows[sample] for sample in micro_batch], device=self._device)
            with torch.no_grad():
                then[index, : cut.completion_ids.shape[1]] = self._policy.logprobs_at(cut, tensors)
                now[index, : cut.completion_ids.shape[1]] = self._policy.logprobs(cut).logprobs
        return then, now, part.behaviour_logprobs, part.completion_mask


def _samples_of_one_version(batch: TrainBatch) -> tuple[int, list[int]]:
    """The version that sampled most whole completions, and up to `MAX_SAMPLES` of them, spread over the batch."""
    mask, versions = batch.completion_mask, batch.token_versions
    oldest = torch.where(mask, versions, versions.max()).amin(dim=1)
    newest = torch.where(mask, versions, versions.min()).amax(dim=1)
    of_version: dict[int, list[int]] = {}
    for sample, (low, high) in enumerate(torch.stack([oldest, newest], dim=1).tolist()):
        if low == high:
            of_version.setdefault(low, []).append(sample)
    if not of_version:
        return 0, []
    version, samples = max(of_version.items(), key=lambda item: (len(item[1]), item[0]))
    return version, samples[:: -(-len(samples) // MAX_SAMPLES)]
