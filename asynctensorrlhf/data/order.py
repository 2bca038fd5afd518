"""The order in which rows are drawn, and the identity of rows and order.

Knows seeds, epochs and draw numbers; does not know what the rows say or who draws them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from asynctensorrlhf.types import PromptRow

_STREAM = 0x65706F63  # keeps these random words apart from others made of the same seed


def epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of the rows, a pure function of its arguments.

    Sorts the raw words of a bit generator: those stay the same over NumPy's versions, `Generator.permutation`
    may change.
    """
    words = np.random.Philox(np.random.SeedSequence((seed, epoch, _STREAM))).random_raw(num_rows)
    return np.argsort(words, kind="stable")


class EpochSource:
    """Rows gone through epoch by epoch: draw d takes row d mod n of the order of epoch d // n.

    Has no state that moves, so any thread may ask for any draw, and a resumed run goes on in the same order.

    Attributes:
        rows: every row, tokenised at load.
        num_draws: draws until the data ends; None = never.
        fingerprint: identity of rows and order; a resumed run compares it.
    """

    def __init__(
        self,
        rows: Sequence[PromptRow],
        *,
        seed: int,
        shuffle: bool,
        num_draws: int | None,
        answer_column: str | None,
    ) -> None:
        self.rows = rows
        self.num_draws = num_draws
        order = f"shuffled epochs, seed {seed}" if shuffle else "epochs in file order"
        self.fingerprint = fingerprint(rows, answer_column, order=order)
        self._shuffle = shuffle
        # Two epochs, because threads at the border ask for both; lru_cache may be called from any thread.
        self._epoch_order = lru_cache(maxsize=2)(partial(epoch_order, len(rows), seed))

    def row_id(self, draw: int) -> int:
        """The row that draw number `draw` (from 0) takes."""
        epoch, place = divmod(draw, len(self.rows))
        return int(self._epoch_order(epoch)[place]) if self._shuffle else place


def fingerprint(rows: Sequence[PromptRow], answer_column: str | None, *, order: str) -> str:
    """Sixteen hex digits that change with any row's ids or answer, with the rows' order, or with `order`."""
    digest = blake2b(order.encode(), digest_size=8)
    for row in rows:
        answer = row.columns[answer_column] if answer_column is not None else None
        digest.update(json.dumps([row.prompt_ids.tolist(), answer]).encode())
    return digest.hexdigest()
