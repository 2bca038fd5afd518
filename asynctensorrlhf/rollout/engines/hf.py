"""The transformers engine: continuous batching over fixed slots with a KV cache.

Knows how to decode many completions of one model at once; does not know groups' rewards, buffers or the trainer.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from asynctensorrlhf.policy.backbone import Backbone
from asynctensorrlhf.policy.load import load_model, num_embeddings
from asynctensorrlhf.policy.load import stop_token_ids as stop_token_ids_of
from asynctensorrlhf.rollout.engines.weights import EngineWeights
from asynctensorrlhf.rollout.sampling import draw_uniforms, sample_tokens
from asynctensorrlhf.rollout.slot_cache import SlotCache, round_up
from asynctensorrlhf.rollout.slots import Slots
from asynctensorrlhf.types import GenerationRequest, Prompt, Sample, WeightSnapshot


@dataclass(frozen=True)
class Prefill:
    """Prompts that have been through the model: their keys and values, and the logits of the first token."""

    keys: list[Float[Tensor, "prompt head column feature"]]
    values: list[Float[Tensor, "prompt head column feature"]]
    logits: Float[Tensor, "row vocab"]


@dataclass
class WaitingGroup:
    """A request whose samples from `next_index` on have no slot yet."""

    request: GenerationRequest
    uniforms: Float64[Tensor, "sample token"]
    next_index: int = 0
    prefill: Prefill | None = None
    prefill_row: int = 0

    @property
    def num_waiting(self) -> int:
        """Samples without a slot."""
        return self.request.num_samples - self.next_index


class HFEngine:
    """Samples completions from a transformers model.

    `max_concurrent` rows are decoded together. A finished row is refilled before the next decode step; the prompt of
    a group is prefilled once and its keys and values are copied to the group's rows. A completion is a function of
    (weights, prompt, seed, group_id, sample_index); on a CPU with one thread bit for bit, elsewhere up to the rounding
    that a device's kernels make depend on the size of a batch (`rollout.slot_cache` says how).

    With `kv="keep"`, completions that are running when new weights arrive go on with the keys and values of the old
    weights: nothing is computed twice, the tokens after the swap are sampled from the new weights on the old cache,
    and their `behaviour_logprobs` say exactly that. With `kv="recompute"` the cache of running completions is made
    anew, so that tokens after the swap equal a fresh forward of the new weights.

    Args:
        model_or_path: a model, used itself and not copied; or a folder or hub id to load.
        device: where to generate; None: where the model is.
        max_new_tokens: most tokens of a completion.
        temperature: > 0.
        max_concurrent: number of slots.
        seed: run seed of every draw.
        stop_token_ids: ids that end a completion; None: every EOS id of the model.
        num_token_ids: ids from here on are never sampled; None: the model's vocabulary.
        kv: `keep` or `recompute`, see above.
        dtype: `float32` or `bfloat16`; with the latter, linear layers compute as under the trainer's autocast.
        greedy: take the most likely token instead of sampling; log-probabilities stay those at `temperature`.
    """

    def __init__(
        self,
        model_or_path: PreTrainedModel | str | Path,
        *,
        device: str | torch.device | None = None,
        max_new_tokens: int = 16,
        temperature: float = 1.0,
        max_concurrent: int = 128,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] | None = None,
        num_token_ids: int | None = None,
        kv: Literal["keep", "recompute"] = "keep",
        dtype: Literal["float32", "bfloat16"] = "float32",
        greedy: bool = False,
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"rollout.temperature must be > 0, got {temperature}")
        if max_new_tokens < 1 or max_concurrent < 1:
            raise ValueError(f"max_new_tokens and max_concurrent must be >= 1, got {max_new_tokens}, {max_concurrent}")
        model = model_or_path if isinstance(model_or_path, PreTrainedModel) else load_model(str(model_or_path))
        if device is not None:
            model.to(device)  # type: ignore[arg-type]
        self.device = model.device
        self.max_new_tokens, self.temperature, self.seed = max_new_tokens, temperature, seed
        self.kv, self.dtype, self.greedy = kv, dtype, greedy
        self.num_embeddings = num_embeddings(model)
        self.num_token_ids = num_token_ids or self.num_embeddings
        self.weights = EngineWeights(model, dtype=dtype)
        self.backbone = Backbone(model)
        stops = stop_token_ids_of(model) if stop_token_ids is None else stop_token_ids
        self.slots = Slots(
            num_slots=max_concurrent, max_new_tokens=max_new_tokens, stop_token_ids=tuple(stops), device=self.device
        )
        self.cache = SlotCache(self.backbone.num_layers, self.slots.ids.shape[0])
        self.waiting: deque[WaitingGroup] = deque()
        self.policy_version = 0
        # by identity: another snapshot of the same version may hold other weights
        self._loaded: WeightSnapshot | None = None

    def add(self, request: GenerationRequest) -> None:
        """Queue a group; all its random numbers are drawn here."""
        prompt = request.prompt
        limit = self.backbone.context_length
        if len(prompt.prompt_ids) + self.max_new_tokens > limit:
            raise ValueError(
                f"prompt of {len(prompt.prompt_ids)} tokens + rollout.max_new_tokens={self.max_new_tokens} exceeds the "
                f"model's context of {limit}: lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        if not 0 <= int(prompt.prompt_ids.min()) <= int(prompt.prompt_ids.max()) < self.num_embeddings:
            raise ValueError(f"prompt ids must be in [0, {self.num_embeddings}), got {prompt.prompt_ids.tolist()}")
        uniforms = draw_uniforms(self.seed, prompt.group_id, request.num_samples, self.max_new_tokens)
        self.waiting.append(WaitingGroup(request, uniforms))

    def has_room(self) -> bool:
        """Whether a slot is free that no waiting sample will take."""
        return self.slots.num_free > sum(group.num_waiting for group in self.waiting)

    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self.waiting and not self.slots.running

    def step(self) -> list[Sample]:
        """Fill the free slots, then decode one token of every row; returns what finished."""
        with torch.no_grad(), self._autocast():
            finished = self._start_waiting() if self.waiting and self.slots.num_free else []
            return finished + (self._decode() if self.slots.running else [])

    def load(self, snapshot: WeightSnapshot) -> None:
        """Swap the weights between two decode steps; running completions go on under the new version."""
        if snapshot is self._loaded:
            return
        self.weights.load(snapshot)
        self._loaded, self.policy_version = snapshot, snapshot.policy_version
        for group in self.waiting:
            group.prefill = None
        if self.kv == "recompute" and self.slots.running:
            with torch.no_grad(), self._autocast():
                self._recompute_cache()

    def close(self) -> None:
        """Drop cache and queue."""
        self.waiting.clear()
        self.slots.running.clear()
        self.cache = SlotCache(0, 0)

    def _autocast(self) -> AbstractContextManager[Any]:
        # entered on every call: the mode belongs to the thread, and a worker's thread starts without it
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _start_waiting(self) -> list[Sample]:
        """Prefill the groups whose turn it is, give their samples slots and draw the first tokens."""
        chosen = self._next_in_line()
        fresh = [group for group, _ in chosen if group.prefill is None]
        if fresh:
            self._prefill(fresh)
        first_row, endings = self.slots.num_live, []
        for prefill in dict.fromkeys(id(group.prefill) for group, _ in chosen):
            endings += self._place([(group, count) for group, count in chosen if id(group.prefill) == prefill])
        while self.waiting and not self.waiting[0].num_waiting:
            self.waiting.popleft()
        return self._pop(first_row, endings)

    def _next_in_line(self) -> list[tuple[WaitingGroup, int]]:
        chosen, num_free = [], self.slots.num_free
        for group in self.waiting:
            count = min(num_free, group.num_waiting)
            if not count:
                break
            chosen.append((group, count))
            num_free -= count
        return chosen

    def _prefill(self, groups: list[WaitingGroup]) -> None:
        hidden, keys, values = self._forward_prompts([group.request.prompt.prompt_ids for group in groups])
        prefill = Prefill(keys, values, self.backbone.head(hidden))
        for row, group in enumerate(groups):
            group.prefill, group.prefill_row = prefill, row

    def _forward_prompts(
        self, prompts: list[Int[Tensor, " _"]]
    ) -> tuple[Float[Tensor, "row hidden"], list[Tensor], list[Tensor]]:
        """Hidden state of each prompt's last token (idle rows after them), and keys and values of all of it."""
        lengths = torch.tensor([len(ids) for ids in prompts])
        ids = torch.zeros(len(prompts), round_up(int(lengths.max())), dtype=torch.long)
        for row, prompt_ids in enumerate(prompts):
            ids[row, : len(prompt_ids)] = prompt_ids
        hidden, keys, values = self.backbone.prefill(ids.to(self.device))
        # the head too sees a granule of rows
        rows = torch.arange(round_up(len(prompts)), device=self.device).clamp_(max=len(prompts) - 1)
        return hidden[rows, lengths.to(self.device)[rows] - 1], keys, values

    def _place(self, chosen: list[tuple[WaitingGroup, int]]) -> list[int]:
        """Copy one prefill to the rows of its samples and draw their first tokens."""
        prefill = chosen[0][0].prefill
        assert prefill is not None
        members: list[tuple[Prompt, int]] = []
        uniforms, prefill_rows = [], []
        for group, count in chosen:
            indices = range(group.next_index, group.next_index + count)
            members += [(group.request.prompt, index) for index in indices]
            uniforms.append(group.uniforms[group.next_index : group.next_index + count])
            prefill_rows += [group.prefill_row] * count
            group.next_index += count
        rows = self.slots.place(members, torch.cat(uniforms))
        index = torch.tensor(prefill_rows, device=self.device)
        self.cache.write_prefixes(rows, [k[index] for k in prefill.keys], [v[index] for v in prefill.values])
        return self._draw(rows, prefill.logits[index])

    def _decode(self) -> list[Sample]:
        """One token for every row."""
        columns = self.slots.columns()
        mask = self.cache.aim(columns, round_up(self.slots.num_columns))
        hidden = self.backbone.decode(self.slots.last_tokens(), columns, mask, self.cache.cache)
        self.slots.num_decode_steps += 1
        rows = slice(0, self.slots.num_live)
        return self._pop(0, self._draw(rows, self.backbone.head(hidden)[rows]))

    def _draw(self, rows: slice, logits: Float[Tensor, "row vocab"]) -> list[int]:
        uniforms = None if self.greedy else self.slots.next_uniforms(rows)
        ids, logprobs = sample_tokens(logits, uniforms, temperature=self.temperature, num_token_ids=self.num_token_ids)
        return self.slots.append(rows, ids, logprobs, self.policy_version)

    def _pop(self, first_row: int, endings: list[int]) -> list[Sample]:
        samples, moves = self.slots.pop(first_row, endings)
        if moves is not None:
            self.cache.move(moves.source, moves.target)
        return samples

    def _recompute_cache(self) -> None:
        """Run what the rows hold, the token to be fed next excepted, through the new weights."""
        generated = self.slots.num_generated.tolist()
        texts = [
            torch.cat([running.prompt.prompt_ids, self.slots.ids[row, : generated[row] - 1].cpu()])
            for row, running in enumerate(self.slots.running)
        ]
        _, keys, values = self._forward_prompts(texts)
        rows = slice(0, self.slots.num_live)
        self.cache.write_prefixes(rows, [k[: len(texts)] for k in keys], [v[: len(texts)] for v in values])
