"""The rollout loop: admit, generate, score, hand in.

Knows the order of these verbs; does not know how any of them is done, nor the trainer.
"""

from __future__ import annotations

from asynctensorrlhf.interfaces import Buffer, BufferClosed, Prompts, RolloutEngine, WeightReader
from asynctensorrlhf.rollout.group_assembler import GroupAssembler
from asynctensorrlhf.rollout.scoring import Scorer
from asynctensorrlhf.types import GenerationRequest


class RolloutWorker:
    """One engine and the loop that keeps it busy; the loop runs in a thread of its own, or turn by turn in sync mode.

    Consumes: tickets of the buffer, draws of the prompt queue, the newest weights.
    Waits for: `buffer.admit`, only while the engine is idle. A worker that waited there while its own samples are
    unfinished would wait for itself.
    Unblocked by: `buffer.advance`, `buffer.drop`, `buffer.close`.
    Leaves by: BufferClosed, or an error of its own, which the supervisor sees.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        buffer: Buffer,
        prompts: Prompts,
        weights: WeightReader,
        scorer: Scorer,
        group_size: int,
    ) -> None:
        self.engine, self.buffer, self.prompts, self.weights = engine, buffer, prompts, weights
        self.scorer, self.group_size = scorer, group_size
        self.assembler = GroupAssembler(group_size)

    def run(self) -> None:
        """Turn after turn until the buffer closes."""
        try:
            while True:
                self.turn()
        except BufferClosed:
            return

    def turn(self) -> None:
        """Fill the engine, step it once, hand in the groups that are complete."""
        while self.engine.has_room() and (ticket := self.buffer.admit(wait=self.engine.is_idle())):
            self.engine.add(GenerationRequest(self.prompts.next(ticket), self.group_size))
        # after admission: a ticket granted at version v + 1 must not be decoded with version v
        self.engine.load(self.weights.latest())
        for group in self.scorer.score(self.assembler.add(self.engine.step())):
            self.buffer.put(group)
