from collections import Counter

import pytest

from asynctensorrlhf.data.arithmetic import arithmetic


@pytest.fixture
def load(char_tokenizer):
    def call(**changes):
        keys = {"seed": 5, "eval_draws": 64, "context_limit": 20, "num_draws": None, "heldout_fraction": 0.1}
        return arithmetic(tokenizer=char_tokenizer, **{**keys, **changes})

    return call


def pairs(source):
    return {tuple(map(int, row.columns["prompt"][:-1].split("+"))) for row in source.rows}


def digit_class(text):
    a, b = text[:-1].split("+")
    return len(a), len(b)


def drawn_texts(source, count):
    return [source.rows[source.row_id(draw)].text for draw in range(count)]


def test_rows_are_all_pairs_with_their_sums(load, char_tokenizer):
    data = load()
    every_row = [*data.train.rows, *data.heldout.rows]
    assert pairs(data.train) | pairs(data.heldout) == {(a, b) for a in range(100) for b in range(100)}
    for row in every_row[:: len(every_row) // 50]:
        a, b = map(int, row.text[:-1].split("+"))
        assert row.text == f"{a}+{b}=" == row.columns["prompt"]
        assert row.columns["answer"] == str(a + b)
        assert char_tokenizer.decode(row.prompt_ids) == row.text


def test_a_tenth_of_each_digit_class_is_held_out(load):
    data = load()
    held_out = Counter(digit_class(row.text) for row in data.heldout.rows)
    assert held_out == {(1, 1): 10, (1, 2): 90, (2, 1): 90, (2, 2): 810}
    assert not pairs(data.train) & pairs(data.heldout)


def test_held_out_pairs_and_draws_do_not_depend_on_the_seed(load):
    one, other = load(seed=0), load(seed=1)
    assert drawn_texts(one.heldout, 64) == drawn_texts(other.heldout, 64)
    assert one.heldout.fingerprint == other.heldout.fingerprint
    assert drawn_texts(one.train, 64) != drawn_texts(other.train, 64)
    assert one.train.fingerprint != other.train.fingerprint


def test_the_draws_are_pinned(load):
    data = load(seed=0)
    assert drawn_texts(data.train, 5) == ["6+48=", "0+7=", "1+7=", "6+7=", "5+71="]
    assert drawn_texts(data.heldout, 5) == ["29+51=", "3+0=", "37+5=", "6+6=", "52+5="]


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_each_operand_has_one_or_two_digits_with_even_chance(load, part):
    source = getattr(load(), part)
    classes = Counter(map(digit_class, drawn_texts(source, 8000)))
    assert len(classes) == 4
    assert all(1800 < count < 2200 for count in classes.values())


def test_every_one_digit_pair_to_train_on_is_drawn(load):
    data = load()
    one_digit = {row.text for row in data.train.rows if digit_class(row.text) == (1, 1)}
    assert one_digit <= set(drawn_texts(data.train, 8000))


def test_draws_are_a_function_of_seed_and_draw_alone(load):
    one, again = load(), load()
    expected = [one.train.row_id(draw) for draw in range(50)]
    assert [again.train.row_id(draw) for draw in reversed(range(50))] == expected[::-1]


@pytest.mark.parametrize("changes", [{"eval_draws": 0}, {"heldout_fraction": 0.0}])
def test_without_evaluation_there_is_no_held_out_source(load, changes):
    assert load(**changes).heldout is None


def test_fraction_zero_trains_on_every_pair(load):
    assert len(load(heldout_fraction=0.0).train.rows) == 10_000


@pytest.mark.parametrize("fraction", [0.0001, 0.9999])
def test_an_extreme_fraction_leaves_no_class_empty(load, fraction):
    data = load(heldout_fraction=fraction)
    for source in (data.train, data.heldout):
        assert len({digit_class(row.text) for row in source.rows}) == 4


def test_the_number_of_draws_is_as_configured(load):
    data = load(num_draws=77)
    assert (data.train.num_draws, data.heldout.num_draws) == (77, 64)
    assert load().train.num_draws is None


def test_counts_say_how_many_pairs_there_are(load):
    assert load().counts == {"num_rows": 9000, "num_heldout_rows": 1000}


def test_a_prompt_over_the_context_is_an_error_naming_the_fix(load):
    assert load(context_limit=6).train.rows
    with pytest.raises(ValueError, match=r"up to 6 tokens.*leaves 5.*rollout\.max_new_tokens"):
        load(context_limit=5)


def test_a_fraction_of_one_is_refused(load):
    with pytest.raises(ValueError, match=r"data\.heldout_fraction must be in \[0, 1\), got 1\.0"):
        load(heldout_fraction=1.0)


def test_one_digit_sums_alone_have_one_class(load):
    data = load(max_digits=1)
    assert pairs(data.train) | pairs(data.heldout) == {(a, b) for a in range(10) for b in range(10)}
    assert len(data.heldout.rows) == 10


def test_a_template_stands_around_the_sum_and_the_answer_stays_the_sums(load):
    data = load(template="1+1=2\n{prompt}", context_limit=40, seed=0)
    row = data.train.rows[data.train.row_id(0)]
    assert row.text == "1+1=2\n6+48="
    assert row.columns == {"prompt": "6+48=", "answer": "54"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"max_digits": 3}, "data.max_digits must be 1 or 2, got 3"), ({"template": "1+1=2"}, r"data.template must hold")],
)
def test_values_that_make_no_task_are_refused(load, changes, message):
    with pytest.raises(ValueError, match=message):
        load(**changes)
