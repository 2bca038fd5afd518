"""Library use: await completions of some prompts, scored and pushed into a buffer.

Knows prompts as dicts of ids; does not know tickets, versions or the trainer.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asynctensorrlhf.interfaces import RolloutEngine
from asynctensorrlhf.rewards.token_match import gpu_reward_simple
from asynctensorrlhf.rollout.complete import complete
from asynctensorrlhf.types import GenerationRequest, Prompt, Sample, Ticket


@runtime_checkable
class ExperienceSink(Protocol):
    """What experiences are pushed into, such as a `BoundedReplayBuffer`."""

    def push(self, exp: Any) -> Any:
        """Take one experience."""
        ...


@dataclass(frozen=True)
class Experience:
    """One scored completion.

    Attributes:
        input_ids: the prompt.
        completion_ids: what was sampled up to the first EOS, which is included.
        behaviour_logprobs: of each sampled id, nats.
        token_versions: policy version of each sampled id.
        reward: 1.0 when the completion before its first EOS equals `gt_ids`, else 0.0.
        min_policy_version: the oldest of `token_versions`.
    """

    input_ids: Int[Tensor, " prompt_token"]
    completion_ids: Int[Tensor, " token"]
    behaviour_logprobs: Float[Tensor, " token"]
    token_versions: Int[Tensor, " token"]
    reward: float
    min_policy_version: int


class AsyncEngine:
    """Runs an engine for callers that await it; calls of several tasks and loops take turns.

    Args:
        buffer: every experience is pushed into it.
        engine: generates; owned by this object from now on.

    Example:
        >>> engine = AsyncEngine(buffer=BoundedReplayBuffer(max_size=100), engine=HFEngine(...))  # doctest: +SKIP
        >>> await engine.rollout([{"input_ids": [5, 6], "gt_ids": [7], "eos_token_id": 2}])  # doctest: +SKIP
    """

    def __init__(self, *, buffer: ExperienceSink, engine: RolloutEngine) -> None:
        self.buffer, self.engine = buffer, engine
        self._turn = threading.Lock()
        self._group_ids = itertools.count()

    async def rollout(self, prompts: Sequence[Mapping[str, Any]]) -> list[Experience]:
        """Complete and score each prompt once; pushes the experiences in the order of the prompts and returns them.

        Args:
            prompts: dicts of `input_ids` and `gt_ids` (1-D, tensors or lists) and `eos_token_id` (one id or several).

        Raises:
            ValueError: a key is missing or `input_ids` is empty; the message names prompt and key.
        """
        checked = [_checked(index, prompt) for index, prompt in enumerate(prompts)]
        experiences = await asyncio.to_thread(self._rollout, checked)
        for experience in experiences:
            self.buffer.push(experience)
        return experiences

    def _rollout(self, prompts: Sequence[Mapping[str, Any]]) -> list[Experience]:
        with self._turn:
            requests = []
            for prompt in prompts:
                group_id = next(self._group_ids)
                draw = Prompt(group_id, 0, prompt["input_ids"], Ticket(group_id, 0))
                requests.append(GenerationRequest(draw, num_samples=1))
            samples = complete(self.engine, requests)
        return [_experience(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]


def _checked(index: int, prompt: Any) -> dict[str, Any]:
    if not isinstance(prompt, Mapping):
        raise ValueError(f"prompts must be a list of dicts, got {prompt!r} as prompt {index}")
    missing = sorted({"input_ids", "gt_ids", "eos_token_id"} - set(prompt))
    if missing:
        raise ValueError(f"prompt {index} lacks {', '.join(missing)}; it has {', '.join(sorted(prompt))}")
    ids = torch.as_tensor(prompt["input_ids"], dtype=torch.long).flatten().cpu()
    if not len(ids):
        raise ValueError(f"prompt {index}: input_ids is empty")
    return {
        "input_ids": ids,
        "gt_ids": torch.as_tensor(prompt["gt_ids"], dtype=torch.long).flatten(),
        "eos_token_id": tuple(torch.as_tensor(prompt["eos_token_id"]).flatten().tolist()),
    }


def _experience(prompt: Mapping[str, Any], sample: Sample) -> Experience:
    # the prompt's EOS need not be one of those that end a completion in the engine
    ended = torch.isin(sample.completion_ids.cpu(), torch.tensor(prompt["eos_token_id"])).nonzero()
    num_tokens = int(ended[0]) + 1 if len(ended) else len(sample.completion_ids)
    ids = sample.completion_ids[:num_tokens]
    reward = gpu_reward_simple(ids[None], prompt["gt_ids"][None].to(ids.device), prompt["eos_token_id"])
    return Experience(
        input_ids=prompt["input_ids"],
        completion_ids=ids,
        behaviour_logprobs=sample.behaviour_logprobs[:num_tokens],
        token_versions=sample.token_versions[:num_tokens],
        reward=float(reward[0]),
        min_policy_version=int(sample.token_versions[0]),
    )
