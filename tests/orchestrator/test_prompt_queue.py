"""Which prompt belongs to which ticket, across threads and resumes, and the awaitable form."""

import asyncio
import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.orchestrator.prompt_queue import PromptQueue
from asynctensorrlhf.types import PromptRow, Ticket

LIMIT_S = 20.0


@dataclass
class FiveRows:
    """Five rows, drawn backwards again and again."""

    num_draws: int | None = None
    fingerprint: str = "five"

    def __post_init__(self):
        self.rows = [PromptRow(torch.tensor([k, 10 + k]), f"row {k}", {"answer": k}) for k in range(5)]

    def row_id(self, draw):
        return 4 - draw % 5


def draws(queue, count):
    return [queue.next(Ticket(k, 0)).group_id for k in range(count)]


def test_a_ticket_gets_the_row_of_its_draw():
    prompt = PromptQueue(FiveRows(), cursor=7).next(Ticket(3, 2))
    assert (prompt.group_id, prompt.row_id) == (10, 4)
    assert prompt.prompt_ids.tolist() == [4, 14]
    assert prompt.ticket == Ticket(3, 2)


def test_a_prompt_belongs_to_its_ticket_whichever_thread_asks_and_in_which_order():
    queue, found = PromptQueue(FiveRows(), cursor=9, reissue=[3, 7]), {}

    def ask(ordinals):
        for ordinal in ordinals:
            found[ordinal] = queue.next(Ticket(ordinal, 0)).group_id

    threads = [threading.Thread(target=ask, args=(range(start, -1, -4),)) for start in (19, 18, 17, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert [found[ordinal] for ordinal in range(20)] == [3, 7, *range(9, 27)]


def test_the_number_available_counts_reissued_draws_and_what_is_left():
    assert PromptQueue(FiveRows(num_draws=12), cursor=9, reissue=[3, 7]).num_available == 5
    assert PromptQueue(FiveRows(num_draws=12), cursor=12).num_available == 0
    assert PromptQueue(FiveRows()).num_available is None


def test_a_ticket_past_the_end_of_the_data_is_an_error():
    queue = PromptQueue(FiveRows(num_draws=12), cursor=11, reissue=[3])
    assert draws(queue, 2) == [3, 11]
    with pytest.raises(IndexError, match="the data ends after 2 draws"):
        queue.next(Ticket(2, 0))
    with pytest.raises(ValueError, match="ordinal must be >= 0"):
        queue.next(Ticket(-1, 0))


def test_a_checkpoint_issues_outstanding_draws_first_and_goes_on_behind_them():
    state = PromptQueue(FiveRows()).state(outstanding_ordinals=[6, 4], num_admitted=7)
    assert state == {"cursor": 7, "reissue": [4, 6]}
    assert draws(PromptQueue(FiveRows(), **state), 4) == [4, 6, 7, 8]


def test_a_second_checkpoint_keeps_draws_that_were_not_issued_again_yet():
    queue = PromptQueue(FiveRows(), cursor=7, reissue=[1, 4, 6])
    assert queue.state(outstanding_ordinals=[0], num_admitted=1) == {"cursor": 7, "reissue": [1, 4, 6]}
    assert queue.state(outstanding_ordinals=[], num_admitted=2) == {"cursor": 7, "reissue": [6]}
    assert queue.state(outstanding_ordinals=[2, 4], num_admitted=5) == {"cursor": 9, "reissue": [6, 8]}


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 6), st.randoms(use_true_random=False)), max_size=6))
def test_over_any_number_of_resumes_no_draw_is_lost_or_doubled(processes):
    ended, state = [], {"cursor": 0, "reissue": []}
    for num_admitted, random in processes:
        queue = PromptQueue(FiveRows(), **state)
        outstanding = [ordinal for ordinal in range(num_admitted) if random.random() < 0.5]
        ended += [queue.group_id(ordinal) for ordinal in range(num_admitted) if ordinal not in outstanding]
        state = queue.state(outstanding_ordinals=outstanding, num_admitted=num_admitted)
    assert sorted([*ended, *state["reissue"]]) == list(range(state["cursor"]))


@pytest.mark.parametrize("reissue", [[3, 3], [7], [-1]])
def test_a_reissue_list_that_no_run_can_leave_is_refused(reissue):
    with pytest.raises(ValueError, match=r"reissue must hold different draws before cursor \(7\)"):
        PromptQueue(FiveRows(), cursor=7, reissue=reissue)


def test_a_negative_cursor_is_refused():
    with pytest.raises(ValueError, match="cursor"):
        PromptQueue(FiveRows(), cursor=-1)


def test_a_queue_without_a_source_cannot_draw():
    with pytest.raises(ValueError, match="source must be given"):
        PromptQueue().next(Ticket(0, 0))


def test_prompts_put_are_got_in_order():
    async def main():
        queue = PromptQueue()
        for prompt in ({"input_ids": [1]}, {"input_ids": [2]}):
            await queue.put(prompt)
        assert len(queue) == 2
        return [await queue.get(), await queue.get()]

    assert asyncio.run(main()) == [{"input_ids": [1]}, {"input_ids": [2]}]


def test_get_waits_for_put_and_put_waits_for_room():
    async def main():
        queue, order = PromptQueue(max_size=1), []

        async def producer():
            for k in range(3):
                await queue.put(k)
                order.append(("put", k))

        async def consumer():
            for _ in range(3):
                order.append(("got", await queue.get()))

        await asyncio.wait_for(asyncio.gather(consumer(), producer()), LIMIT_S)
        return order

    order = asyncio.run(main())
    assert [value for kind, value in order if kind == "got"] == [0, 1, 2]
    assert order.index(("got", 0)) < order.index(("put", 2))


def test_threads_with_event_loops_of_their_own_share_a_queue():
    queue, got = PromptQueue(max_size=2), []

    async def produce(start):
        for k in range(start, start + 50):
            await queue.put(k)

    async def consume():
        for _ in range(50):
            got.append(await queue.get())

    def run(coroutine):
        asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))

    threads = [
        threading.Thread(target=run, args=(coroutine,), daemon=True)
        for coroutine in (produce(0), produce(100), consume(), consume())
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(got) == [*range(50), *range(100, 150)]


def test_a_cancelled_get_takes_nothing_and_leaves_nothing_behind():
    errors = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        queue = PromptQueue()
        for _ in range(5):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(queue.get(), 0.001)
        num_waiters = len(queue._waiters)
        await queue.put("x")
        await asyncio.sleep(0)
        return num_waiters, await asyncio.wait_for(queue.get(), LIMIT_S)

    num_waiters, value = asyncio.run(main())
    assert num_waiters <= 1
    assert value == "x"
    assert not errors


def test_a_waiter_whose_loop_is_gone_does_not_disturb_others():
    queue = PromptQueue()

    async def give_up():
        task = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(give_up())

    async def go_on():
        await queue.put(1)
        return await queue.get()

    assert asyncio.run(asyncio.wait_for(go_on(), LIMIT_S)) == 1


@pytest.mark.parametrize("max_size", [0, -1])
def test_a_queue_without_room_is_refused(max_size):
    with pytest.raises(ValueError, match="max_size must be >= 1 or None"):
        PromptQueue(max_size=max_size)
