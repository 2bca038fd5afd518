import threading
from collections import Counter

import pytest
import torch

from asynctensorrlhf.data.order import EpochSource
from asynctensorrlhf.types import PromptRow


def rows(count, first=0):
    return [PromptRow(torch.tensor([i]), f"p{i}", {"answer": str(i)}) for i in range(first, first + count)]


def source(count=10, *, seed=7, shuffle=True, num_draws=None, first=0):
    return EpochSource(rows(count, first), seed=seed, shuffle=shuffle, num_draws=num_draws, answer_column="answer")


def order(prompts, start, stop):
    return [prompts.row_id(draw) for draw in range(start, stop)]


def test_every_epoch_draws_every_row_once_in_an_order_of_its_own():
    drawn = order(source(), 0, 30)
    epochs = [drawn[:10], drawn[10:20], drawn[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_source_built_anew_goes_on_in_the_order_of_the_uninterrupted_one():
    assert order(source(), 17, 45) == order(source(), 0, 45)[17:]


def test_draws_may_be_asked_in_any_order():
    forward, backward = source(), source()
    assert [backward.row_id(draw) for draw in reversed(range(40))] == order(forward, 0, 40)[::-1]


def test_another_seed_draws_in_another_order():
    assert order(source(seed=7), 0, 10) != order(source(seed=8), 0, 10)


def test_the_order_of_a_seed_is_pinned():
    assert order(source(seed=7), 0, 10) == [3, 2, 5, 8, 0, 1, 9, 6, 4, 7]


def test_without_shuffle_rows_come_in_file_order_each_epoch():
    assert order(source(4, shuffle=False), 0, 9) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_threads_share_the_draws_of_one_order():
    prompts, drawn, start = source(50), [], threading.Barrier(4)

    def draw_share(first):
        start.wait(timeout=30)
        drawn.extend((draw, prompts.row_id(draw)) for draw in range(first, 400, 4))

    threads = [threading.Thread(target=draw_share, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [row for _, row in sorted(drawn)] == order(source(50), 0, 400)
    assert set(Counter(row for _, row in drawn).values()) == {8}


@pytest.mark.parametrize(
    "other",
    [source(seed=8), source(shuffle=False), source(9), source(first=1)],
    ids=["seed", "shuffle", "length", "rows"],
)
def test_the_fingerprint_changes_with_rows_and_order(other):
    assert source().fingerprint == source(num_draws=30).fingerprint
    assert other.fingerprint != source().fingerprint


def test_the_fingerprint_changes_with_an_answer_with_an_id_and_with_the_sequence():
    def of(prompt_rows):
        return EpochSource(prompt_rows, seed=7, shuffle=True, num_draws=None, answer_column="answer").fingerprint

    other_answer = [*rows(9), PromptRow(torch.tensor([9]), "p9", {"answer": "nine"})]
    other_ids = [*rows(9), PromptRow(torch.tensor([9, 9]), "p9", {"answer": "9"})]
    assert len({of(rows(10)), of(other_answer), of(other_ids), of(rows(10)[::-1])}) == 4


def test_the_seed_does_not_name_an_order_that_does_not_use_it():
    assert source(seed=1, shuffle=False).fingerprint == source(seed=2, shuffle=False).fingerprint
