"""What a run has done so far; saved in every checkpoint and continued by a resume.

Knows counters; does not know what raises them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Cumulative over resumes.

    Attributes:
        num_steps: finished trainer steps.
        completion_tokens: sampled tokens that were trained.
        train_wall_s: seconds in the training loop, evaluations left out.
        max_staleness_seen: of all trained groups, versions.
        accuracy_before: held-out, sampled, of the first weights; None without a held-out set.
        greedy_before: the same, greedy.
        accuracy_after: of the last evaluation, sampled.
        greedy_after: the same, greedy.
    """

    num_steps: int = 0
    completion_tokens: int = 0
    train_wall_s: float = 0.0
    max_staleness_seen: int = 0
    accuracy_before: float | None = None
    greedy_before: float | None = None
    accuracy_after: float | None = None
    greedy_after: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take every field from `state`; a missing one is an error."""
        for field in fields(self):
            setattr(self, field.name, state[field.name])
