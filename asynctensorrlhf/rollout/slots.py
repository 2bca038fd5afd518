"""The completions that run at the same time: one row each, packed from row 0.

Knows what has been sampled into every row and when a row is finished; does not know models or caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from asynctensorrlhf.rollout.sampling import uniforms_on
from asynctensorrlhf.rollout.slot_cache import round_up
from asynctensorrlhf.types import Prompt, Sample


@dataclass(frozen=True)
class Running:
    """A live row: `base` is the prompt's length minus the decode steps that had been made when it was placed."""

    prompt: Prompt
    sample_index: int
    base: int


@dataclass(frozen=True)
class Moves:
    """Rows to copy so that the live ones stay packed: `source[i]` over `target[i]`."""

    source: Int[Tensor, " row"]
    target: Int[Tensor, " row"]


class Slots:
    """State of up to `num_slots` running completions; rows `0 .. num_live - 1` are live."""

    def __init__(
        self, *, num_slots: int, max_new_tokens: int, stop_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        # spare rows: the number of decoded rows is rounded up, see slot_cache
        shape = (round_up(num_slots), max_new_tokens)
        self.num_slots = num_slots
        self.max_new_tokens = max_new_tokens
        self.device = device
        self.stop_token_ids = torch.tensor(stop_token_ids, dtype=torch.long, device=device)
        self.ids = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.versions = torch.zeros(shape, dtype=torch.long, device=device)
        self.uniforms = uniforms_on(device, torch.zeros(shape, dtype=torch.float64))
        self.prompt_lengths = torch.ones(shape[0], dtype=torch.long, device=device)
        self.num_generated = torch.ones(shape[0], dtype=torch.long, device=device)
        self.running: list[Running] = []
        self.num_decode_steps = 0

    @property
    def num_live(self) -> int:
        """Rows in use."""
        return len(self.running)

    @property
    def num_free(self) -> int:
        """Rows that a new completion could take."""
        return self.num_slots - len(self.running)

    @property
    def num_decoded_rows(self) -> int:
        """Rows of a decode step: the live ones, and idle ones up to the granule."""
        return round_up(self.num_live)

    @property
    def num_columns(self) -> int:
        """Columns that the next decode step reads, its own included: known without asking the device."""
        return max(row.base for row in self.running) + self.num_decode_steps + 1

    def place(self, members: list[tuple[Prompt, int]], uniforms: Float64[Tensor, "row token"]) -> slice:
        """Give each (prompt, sample_index) a row; nothing is sampled into it yet."""
        rows = slice(self.num_live, self.num_live + len(members))
        lengths = [len(prompt.prompt_ids) for prompt, _ in members]
        self.prompt_lengths[rows] = torch.tensor(lengths, device=self.device)
        self.uniforms[rows] = uniforms_on(self.device, uniforms)
        self.num_generated[rows] = 0
        self.running.extend(
            Running(prompt, sample_index, length - self.num_decode_steps)
            for (prompt, sample_index), length in zip(members, lengths, strict=True)
        )
        return rows

    def last_tokens(self) -> Int[Tensor, " row"]:
        """The token to feed next, for every decoded row."""
        rows = self.num_decoded_rows
        return self.ids[:rows].gather(1, self.num_generated[:rows, None].clamp(1) - 1).squeeze(1)

    def columns(self) -> Int[Tensor, " row"]:
        """Where the keys and values of that token go, for every decoded row."""
        rows = self.num_decoded_rows
        return self.prompt_lengths[:rows] + self.num_generated[:rows].clamp(1) - 1

    def next_uniforms(self, rows: slice) -> Float[Tensor, " row"]:
        """The uniforms of the next token of `rows`."""
        return self.uniforms[rows].gather(1, self.num_generated[rows, None]).squeeze(1)

    def append(
        self, rows: slice, ids: Int[Tensor, " row"], logprobs: Float[Tensor, " row"], policy_version: int
    ) -> list[int]:
        """Record one sampled token a row.

        Returns:
            Per row 0 while it goes on, else twice its length, plus 1 when a stop token ended it. The one host
            synchronisation of a decode step.
        """
        place = self.num_generated[rows, None]
        self.ids[rows].scatter_(1, place, ids[:, None])
        self.logprobs[rows].scatter_(1, place, logprobs[:, None])
        self.versions[rows].scatter_(1, place, policy_version)
        self.num_generated[rows] += 1
        is_stop = torch.isin(ids, self.stop_token_ids)
        is_finished = is_stop | (self.num_generated[rows] == self.max_new_tokens)
        endings: list[int] = torch.where(is_finished, 2 * self.num_generated[rows] + is_stop, 0).tolist()
        return endings

    def pop(self, first_row: int, endings: list[int]) -> tuple[list[Sample], Moves | None]:
        """Take out the rows that `append` called finished; `endings[i]` belongs to row `first_row + i`.

        Returns:
            Their samples, and the moves that keep the live rows packed (to be made in the cache as well).
        """
        finished = [first_row + i for i, ending in enumerate(endings) if ending]
        if not finished:
            return [], None
        rows = torch.tensor(finished, device=self.device)
        ids, logprobs, versions = self.ids[rows], self.logprobs[rows], self.versions[rows]
        samples = []
        for i, row in enumerate(finished):
            length, is_stop = divmod(endings[row - first_row], 2)
            samples.append(
                Sample(
                    prompt=self.running[row].prompt,
                    sample_index=self.running[row].sample_index,
                    completion_ids=ids[i, :length],
                    behaviour_logprobs=logprobs[i, :length],
                    token_versions=versions[i, :length],
                    finish_reason="stop" if is_stop else "length",
                )
            )
        return samples, self._pack(finished)

    def _pack(self, finished: list[int]) -> Moves | None:
        gone = set(finished)
        num_left = self.num_live - len(finished)
        holes = [row for row in finished if row < num_left]
        tail = [row for row in range(num_left, self.num_live) if row not in gone]
        for hole, row in zip(holes, tail, strict=True):
            self.running[hole] = self.running[row]
        del self.running[num_left:]
        if not holes:
            return None
        moves = Moves(torch.tensor(tail, device=self.device), torch.tensor(holes, device=self.device))
        for state in (self.ids, self.logprobs, self.versions, self.uniforms, self.prompt_lengths, self.num_generated):
            state[moves.target] = state[moves.source]
        return moves
