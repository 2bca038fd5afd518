"""Which prompt belongs to which ticket, and what a checkpoint must remember so that none is lost.

Knows draws and tickets; does not know how rows are made or trained.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from asynctensorrlhf.interfaces import PromptSource
from asynctensorrlhf.types import Prompt, Ticket


class AwaitableQueue:
    """FIFO with `await put` and `await get`, for any number of threads and event loops.

    `get` waits for an item, `put` for room; each wakes the other. Neither has a time limit of its own: wrap it in
    `asyncio.wait_for`. Cancelling a wait loses nothing.

    Args:
        max_size: most items; None = no limit.
    """

    def __init__(self, max_size: int | None = None) -> None:
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size must be >= 1 or None, got {max_size}")
        self.max_size = max_size
        self._items: deque[Any] = deque()
        self._lock = threading.Lock()
        self._waiters: list[asyncio.Future[None]] = []

    async def put(self, item: Any) -> None:
        """Append an item; waits while the queue is full."""
        while (changed := self._try_put(item)) is not None:
            await changed

    async def get(self) -> Any:
        """Remove and return the oldest item; waits while there is none."""
        taken: list[Any] = []
        while (changed := self._try_get(taken)) is not None:
            await changed
        return taken[0]

    def __len__(self) -> int:
        with self._lock:
            return len(self._items)

    def _try_put(self, item: Any) -> asyncio.Future[None] | None:
        with self._lock:
            if self.max_size is not None and len(self._items) >= self.max_size:
                return self._next_change()
            self._items.append(item)
            self._wake()
            return None

    def _try_get(self, taken: list[Any]) -> asyncio.Future[None] | None:
        with self._lock:
            if not self._items:
                return self._next_change()
            taken.append(self._items.popleft())
            self._wake()
            return None

    def _next_change(self) -> asyncio.Future[None]:
        # registered under the lock that saw the queue full or empty: no change can slip in between
        changed = asyncio.get_running_loop().create_future()
        self._waiters = [*(waiter for waiter in self._waiters if not waiter.done()), changed]
        return changed

    def _wake(self) -> None:
        # everyone, since a waiter may have been cancelled; those who find nothing wait again
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # its loop was closed, and the waiter went with it
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


class PromptQueue(AwaitableQueue):
    """The prompts of a run, by ticket; for library use also a queue of prompts with `await put` and `await get`.

    Ticket number k gets draw `reissue[k]`, and after those `cursor`, `cursor + 1`, ...: a pure function, so it doesn't
    matter which thread asks, in which order, or whether it asks at all. The two uses don't touch each other.

    Example: of 7 draws, 4 and 6 are outstanding at a checkpoint. The resumed run has `cursor=7, reissue=[4, 6]`, and
    its tickets 0, 1, 2, 3 get the draws 4, 6, 7, 8.

    Args:
        source: rows and their order; None: only `put` and `get` work.
        cursor: the first draw that was never made.
        reissue: earlier draws that were neither trained nor dropped, in the order in which they are made again.
        max_size: most prompts between `put` and `get`; None = no limit.
    """

    def __init__(
        self,
        source: PromptSource | None = None,
        *,
        cursor: int = 0,
        reissue: Sequence[int] = (),
        max_size: int | None = None,
    ) -> None:
        super().__init__(max_size)
        if cursor < 0 or len(set(reissue)) != len(reissue) or any(not 0 <= draw < cursor for draw in reissue):
            raise ValueError(f"reissue must hold different draws before cursor ({cursor}), got {list(reissue)}")
        self.source, self.cursor, self.reissue = source, cursor, tuple(reissue)

    @property
    def num_available(self) -> int | None:
        """Draws until the data ends, reissued ones included; None = it never ends."""
        num_draws = self._source().num_draws
        return None if num_draws is None else len(self.reissue) + max(0, num_draws - self.cursor)

    def group_id(self, ordinal: int) -> int:
        """The draw that belongs to a ticket: its index over the whole run, the same after a resume."""
        if ordinal < 0:
            raise ValueError(f"ordinal must be >= 0, got {ordinal}")
        if ordinal < len(self.reissue):
            return self.reissue[ordinal]
        return self.cursor + ordinal - len(self.reissue)

    def next(self, ticket: Ticket) -> Prompt:
        """The prompt of a ticket.

        Raises:
            IndexError: the data ended before this ticket; `buffer.limit_admissions` keeps that from happening.
        """
        source, available = self._source(), self.num_available
        if available is not None and ticket.ordinal >= available:
            raise IndexError(f"the data ends after {available} draws, got {ticket}")
        group_id = self.group_id(ticket.ordinal)
        row_id = source.row_id(group_id)
        return Prompt(group_id=group_id, row_id=row_id, prompt_ids=source.rows[row_id].prompt_ids, ticket=ticket)

    def state(self, *, outstanding_ordinals: Sequence[int], num_admitted: int) -> dict[str, Any]:
        """`cursor` and `reissue` of a run that goes on from here.

        Args:
            outstanding_ordinals: tickets neither trained nor dropped, whether their prompt was asked for or not.
            num_admitted: tickets granted so far, of the same moment: both come from one `buffer.state_dict()`.

        Returns:
            Outstanding draws first, then those of an earlier resume that haven't been granted again.
        """
        reissue = [self.group_id(ordinal) for ordinal in sorted(outstanding_ordinals)]
        cursor = self.cursor + max(0, num_admitted - len(self.reissue))
        return {"cursor": cursor, "reissue": [*reissue, *self.reissue[num_admitted:]]}

    def _source(self) -> PromptSource:
        if self.source is None:
            raise ValueError("source must be given to draw prompts by ticket, got None")
        return self.source


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
