"""An engine without a model: scripted ids, delays, stragglers and failures.

Knows how to misbehave on purpose; does not know what the ids mean.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asynctensorrlhf.types import GenerationRequest, Prompt, Sample, WeightSnapshot


@dataclass
class ScriptedSample:
    """A running sample: its ids, the step counts at which it grows, and the versions that it has seen."""

    prompt: Prompt
    sample_index: int
    ids: Sequence[int]
    steps_per_token: int
    num_steps: int = 0
    versions: list[int] | None = None


class StubEngine:
    """Hands out scripted completions, a token every step, a straggler a token every `straggler_factor` steps.

    Without a script, ids are drawn from the vocabulary by (seed, group_id, sample_index). Every token's
    log-probability is that of a uniform choice among `num_token_ids`.

    Args:
        max_new_tokens: most tokens of a completion; a longer script is cut and finishes by `length`.
        max_concurrent: samples that run at the same time.
        seed: of ids, delays and stragglers.
        stop_token_ids: the first of them ends a drawn completion.
        num_token_ids: size of the vocabulary.
        script: completions handed out in turn (sample k of the engine takes entry k modulo its length).
        mean_delay_s: mean of the exponential delay of a step, seconds.
        straggler_fraction: share of the samples that are slow.
        straggler_factor: how many steps a straggler takes per token.
        fail_at_step: raise at this call of `step`, from 1.
        fail_message: what the error says.
        others: what only an engine with a model reads (model, device, temperature, kv, dtype).
    """

    def __init__(
        self,
        *,
        max_new_tokens: int = 16,
        max_concurrent: int = 128,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (0,),
        num_token_ids: int = 100,
        script: Sequence[Sequence[int]] | None = None,
        mean_delay_s: float = 0.0,
        straggler_fraction: float = 0.0,
        straggler_factor: int = 10,
        fail_at_step: int | None = None,
        fail_message: str = "scripted failure",
        **others: Any,
    ) -> None:
        self.max_new_tokens, self.max_concurrent, self.seed = max_new_tokens, max_concurrent, seed
        self.stop_token_ids, self.num_token_ids, self.script = stop_token_ids, num_token_ids, script
        self.mean_delay_s, self.straggler_fraction = mean_delay_s, straggler_fraction
        self.straggler_factor = straggler_factor
        self.fail_at_step, self.fail_message = fail_at_step, fail_message
        self.delays = np.random.Generator(np.random.Philox(seed))
        self.waiting: deque[ScriptedSample] = deque()
        self.running: list[ScriptedSample] = []
        self.policy_version = 0
        self.num_steps = 0
        self.num_samples = 0
        self._closed = threading.Event()

    def add(self, request: GenerationRequest) -> None:
        """Script every sample of the request."""
        for index in range(request.num_samples):
            key = np.array([self.seed, request.prompt.group_id], dtype=np.uint64)
            draws = np.random.Generator(np.random.Philox(key=key, counter=index))
            is_straggler = draws.random() < self.straggler_fraction
            ids = self._scripted_ids() if self.script is not None else self._drawn_ids(draws)
            factor = self.straggler_factor if is_straggler else 1
            self.waiting.append(ScriptedSample(request.prompt, index, ids, factor, versions=[]))
            self.num_samples += 1

    def has_room(self) -> bool:
        """Whether a sample would start at once."""
        return len(self.running) + len(self.waiting) < self.max_concurrent

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.running and not self.waiting

    def step(self) -> list[Sample]:
        """Wait out the delay, grow every running sample, give out the finished ones."""
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError(self.fail_message)
        if self.mean_delay_s:
            self._closed.wait(self.delays.exponential(self.mean_delay_s))
        while self.waiting and len(self.running) < self.max_concurrent:
            self.running.append(self.waiting.popleft())
        for sample in self.running:
            self._grow(sample)
        finished = [sample for sample in self.running if len(sample.versions or ()) == len(sample.ids)]
        self.running = [sample for sample in self.running if len(sample.versions or ()) < len(sample.ids)]
        return [self._finish(sample) for sample in finished]

    def load(self, snapshot: WeightSnapshot) -> None:
        """Take over the version; there are no weights."""
        self.policy_version = snapshot.policy_version

    def close(self) -> None:
        """End a delay that is under way."""
        self._closed.set()

    def _scripted_ids(self) -> Sequence[int]:
        assert self.script is not None
        ids = self.script[self.num_samples % len(self.script)]
        if not len(ids):
            raise ValueError(f"engine.script holds an empty completion at {self.num_samples % len(self.script)}")
        return ids[: self.max_new_tokens]

    def _drawn_ids(self, draws: np.random.Generator) -> Sequence[int]:
        length = int(draws.integers(1, self.max_new_tokens + 1))
        ids: list[int] = draws.integers(0, self.num_token_ids, size=length).tolist()
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), None)
        if stop is not None:
            return ids[: stop + 1]
        return [*ids[:-1], self.stop_token_ids[0]]

    def _grow(self, sample: ScriptedSample) -> None:
        assert sample.versions is not None
        sample.num_steps += 1
        if sample.num_steps % sample.steps_per_token == 0:
            sample.versions.append(self.policy_version)

    def _finish(self, sample: ScriptedSample) -> Sample:
        ids = torch.tensor(list(sample.ids), dtype=torch.long)
        return Sample(
            prompt=sample.prompt,
            sample_index=sample.sample_index,
            completion_ids=ids,
            behaviour_logprobs=torch.full((len(ids),), -math.log(self.num_token_ids)),
            token_versions=torch.tensor(sample.versions, dtype=torch.long),
            finish_reason="stop" if int(ids[-1]) in self.stop_token_ids else "length",
        )
