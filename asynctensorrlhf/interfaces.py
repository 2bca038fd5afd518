"""The contracts between the parts, as protocols.

Says what each part promises and who wakes whom; holds no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from asynctensorrlhf.types import (
    AdvantageInputs,
    AdvantageOutput,
    BatchPlan,
    GenerationRequest,
    LossInputs,
    LossOutput,
    Prompt,
    PromptRow,
    RewardInputs,
    Sample,
    SampleGroup,
    Ticket,
    WeightSnapshot,
)


class BufferClosed(Exception):
    """The buffer was closed; `__cause__` is the error that closed it, if one did. The only way out of a worker."""


@runtime_checkable
class PromptSource(Protocol):
    """Rows and the order in which they are drawn: a pure function of the seed and the draw's index.

    Attributes:
        rows: every row, tokenised at load.
        num_draws: draws until the data ends; None = never.
        fingerprint: identity of rows and order; a resumed run compares it.
    """

    rows: Sequence[PromptRow]
    num_draws: int | None
    fingerprint: str

    def row_id(self, draw: int) -> int:
        """The row that draw number `draw` (from 0) takes."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rewards and reports use."""

    def __call__(self, text: Any, **options: Any) -> Any:
        """Ids of one text or of a list of texts, under `input_ids`."""
        ...

    def decode(self, token_ids: Any, **options: Any) -> Any:
        """The text of ids."""
        ...


@runtime_checkable
class RolloutEngine(Protocol):
    """Turns requests into samples. Owned by one thread; owns its weights.

    Between two `load` calls its output is a function of (weights, prompt, run seed, group_id, sample_index): not of
    what else is in the batch, nor of what the trainer does meanwhile.
    """

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; its samples start in the next `step`."""
        ...

    def step(self) -> list[Sample]:
        """Advance every running completion by a token; return those that finished."""
        ...

    def has_room(self) -> bool:
        """Whether another request would start at once."""
        ...

    def is_idle(self) -> bool:
        """Whether nothing is queued or running: `step` would do nothing."""
        ...

    def load(self, snapshot: WeightSnapshot) -> None:
        """Take new weights between two steps; a tensor that is missing or misshapen is an error and changes nothing."""
        ...

    def close(self) -> None:
        """Free what the engine holds; it can't be used again."""
        ...


@runtime_checkable
class Buffer(Protocol):
    """Admission, order and eviction of groups between rollout threads and the trainer. Thread-safe.

    Conservation, at any time: admitted = trained + held + in flight + dropped.
    """

    def admit(self, wait: bool) -> Ticket | None:
        """Leave to draw a prompt, or None when the bound is reached and `wait` is False.

        Waits for: `advance`, `drop`, an eviction, or `close`. Raises BufferClosed once closed.
        """
        ...

    def put(self, group: SampleGroup) -> None:
        """Hand in the complete group of a ticket; never waits. Wakes `take`."""
        ...

    def drop(self, ticket: Ticket, reason: str) -> None:
        """Give a ticket up; counted under `reason`. Wakes `admit` and `take`."""
        ...

    def take(self, num_groups: int) -> list[SampleGroup]:
        """The next groups in order; fewer than asked only when the data has ended. Waits for `put` or `close`."""
        ...

    def advance(self, policy_version: int, discard_reason: str | None = None) -> None:
        """What was taken is trained (or discarded for a reason) and `policy_version` is published. Wakes `admit`."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Wake every wait with BufferClosed, caused by `error`. The first call counts."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Counts: drawn, trained, held, in_flight, dropped by reason."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores completions from their ids, on their device, without a host synchronisation."""

    def encode(self, rows: Sequence[PromptRow], tokenizer: Tokenizer) -> dict[str, Tensor]:
        """Answer columns as tensors, first axis = row; called once at load. A bad answer is an error naming the row."""
        ...

    def __call__(self, batch: RewardInputs) -> Float[Tensor, " sample"]:
        """One float32 score per sample; NaN = no score."""
        ...


@runtime_checkable
class GroupAdvantage(Protocol):
    """Advantages of complete groups."""

    def __call__(self, rewards: Float[Tensor, "group sample"]) -> Float[Tensor, "group sample"]:
        """One advantage per sample; exactly 0 for unscored samples and for groups without variance."""
        ...


@runtime_checkable
class Advantage(GroupAdvantage, Protocol):
    """How rewards become advantages, in two places: when a group is complete, and when its batch is trained.

    Attributes:
        needs: names of the optional `AdvantageInputs` it reads: `proximal_logprobs`, `ref_logprobs`, `values`.
    """

    @property
    def needs(self) -> frozenset[str]:
        """See above."""
        ...

    def over_batch(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """What needs values or the whole batch; called once a step with the same inputs on every rank."""
        ...


@runtime_checkable
class Loss(Protocol):
    """A pure function of log-probabilities and advantages.

    Attributes:
        needs: names of the optional `LossInputs` it reads: `proximal_logprobs`, `ref_logprobs`, `entropy`, `plan`.
        sequences: which of them `global_num_sequences` counts: `trained`, those with a trained token, or `all`.
        acts_without_advantage: whether samples whose advantages are all 0 have a gradient (KL, entropy).
    """

    @property
    def needs(self) -> frozenset[str]:
        """See above."""
        ...

    @property
    def sequences(self) -> str:
        """See above."""
        ...

    @property
    def acts_without_advantage(self) -> bool:
        """See above."""
        ...

    def plan(self, inputs: LossInputs) -> BatchPlan:
        """What is decided over the whole optimizer batch; called when `needs` holds `plan`, with detached inputs."""
        ...

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The micro-batch's share of the loss and of its metrics."""
        ...


@runtime_checkable
class WeightReader(Protocol):
    """The newest published weights."""

    def latest(self) -> WeightSnapshot:
        """Never waits for a publication in progress."""
        ...


@runtime_checkable
class Prompts(Protocol):
    """Hands out draws by ticket: draw i belongs to ticket i, whichever thread asks."""

    def next(self, ticket: Ticket) -> Prompt:
        """The draw of a ticket."""
        ...
