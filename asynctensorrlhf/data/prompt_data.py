"""What a data source hands to a run.

Knows the parts: rows to train on, rows held out, what was counted; does not know where rows come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynctensorrlhf.interfaces import PromptSource


@dataclass(frozen=True)
class PromptData:
    """The data of a run.

    Attributes:
        train: rows and order of the prompts to train on.
        heldout: prompts of the evaluation, the same for every seed; None: no evaluation.
        counts: what was read, dropped (by reason) and cut: `num_*`; of a held-out file: `num_heldout_*`.
    """

    train: PromptSource
    heldout: PromptSource | None
    counts: Mapping[str, int]
