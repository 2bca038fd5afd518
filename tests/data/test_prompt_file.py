import pytest
from tokenizers import normalizers


def numbered(count):
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


def texts(source):
    return [row.text for row in source.rows]


@pytest.mark.parametrize(
    "empty",
    ['{"prompt": ""}', '{"prompt": " \\n"}', '{"prompt": null}', '{"answer": "b"}', '{"prompt": []}',
     '{"prompt": [{"role": "user", "content": " "}]}'],
)  # fmt: skip
def test_an_empty_prompt_is_dropped_and_counted(load, empty):
    data = load([empty, {"prompt": "full", "answer": "b"}], template="Q: {prompt}")
    assert texts(data.train) == ["Q: full"]
    assert data.counts["num_dropped_empty_prompt"] == 1


@pytest.mark.parametrize("name", ["char_tokenizer", "bos_tokenizer"])
def test_a_prompt_that_the_tokenizer_makes_nothing_of_is_dropped_and_counted(load, name, request):
    tokenizer = request.getfixturevalue(name)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    rows = [{"prompt": "\u200b", "answer": "1"}, {"prompt": "full", "answer": "2"}]
    data = load(rows, tokenizer=tokenizer)
    assert [row.columns["answer"] for row in data.train.rows] == ["2"]
    assert data.counts["num_dropped_empty_prompt"] == 1


def test_a_prompt_of_another_type_is_refused_with_its_line(load):
    for prompt in ("7", '{"role": "user"}', '["a"]'):
        with pytest.raises(ValueError, match=r"line 1: 'prompt' must be a text or a list of chat messages"):
            load([f'{{"prompt": {prompt}, "answer": "b"}}'])


@pytest.mark.parametrize("content", [b"", b"\n\r\n"])
def test_a_file_without_rows_is_an_error(load, content):
    with pytest.raises(ValueError, match=r"^data\.path: .*my\.jsonl holds no rows"):
        load(content)


def test_nothing_left_is_an_error_that_says_why(load):
    rows = [
        {"prompt": "", "answer": "1"},
        {"prompt": "long", "answer": "1"},
        {"prompt": "longer", "answer": "1"},
    ]
    with pytest.raises(ValueError, match=r"3 rows read, 1 dropped with an empty prompt, 2 with more than 3 tokens"):
        load(rows, max_prompt_tokens=3)


def test_counts_add_up_to_the_rows_read(load):
    rows = [{"prompt": text, "answer": "1"} for text in ("abc", "", "abcd", "abcdef", "ab")]
    dropped = load(rows, max_prompt_tokens=3).counts
    assert dropped == {
        "num_rows_read": 5,
        "num_blank_lines": 0,
        "num_dropped_empty_prompt": 1,
        "num_dropped_too_long": 2,
        "num_cut": 0,
        "num_rows": 2,
    }
    cut = load(rows, max_prompt_tokens=3, too_long="cut_left")
    assert (cut.counts["num_cut"], cut.counts["num_rows"]) == (2, 4)
    assert texts(cut.train) == ["abc", "bcd", "def", "ab"]


@pytest.mark.parametrize(("context_limit", "configured"), [(3, None), (3, 9), (9, 3)])
def test_the_smaller_limit_counts(load, context_limit, configured):
    rows = [{"prompt": "abc", "answer": "1"}, {"prompt": "abcd", "answer": "1"}]
    data = load(rows, context_limit=context_limit, max_prompt_tokens=configured)
    assert texts(data.train) == ["abc"]


def test_too_long_error_names_the_line(load):
    with pytest.raises(ValueError, match=r"^data\.too_long: .*line 2: the prompt has 4 tokens, allowed are 3"):
        load(
            [{"prompt": "abc", "answer": "1"}, {"prompt": "abcd", "answer": "1"}],
            context_limit=3,
            too_long="error",
        )


def test_the_limit_counts_the_ids_of_the_filled_in_template(load):
    rows = [{"prompt": "ab", "answer": "1"}, {"prompt": "abc", "answer": "1"}]
    assert texts(load(rows, template="<{prompt}>", max_prompt_tokens=4).train) == ["<ab>"]


def test_text_and_chat_prompts_may_be_mixed(load, bos_tokenizer):
    rows = [
        {"prompt": "plain", "answer": "1"},
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "2"},
        {"prompt": "last", "answer": "3"},
    ]
    data = load(rows, tokenizer=bos_tokenizer)
    assert texts(data.train) == ["<s>plain", "<s>[user]hi[assistant]", "<s>last"]
    for row in data.train.rows:
        assert row.prompt_ids.tolist().count(bos_tokenizer.bos_token_id) == 1


def test_a_cut_chat_prompt_keeps_the_opening_of_the_answer(load, bos_tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "z" * 50}], "answer": "2"}]
    data = load(rows, tokenizer=bos_tokenizer, max_prompt_tokens=5, too_long="cut_left")
    assert texts(data.train) == ["<s>zzz[assistant]"]


def test_chat_errors_name_the_line(load, char_tokenizer, bos_tokenizer):
    rows = [
        {"prompt": "plain", "answer": "1"},
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "2"},
    ]
    with pytest.raises(ValueError, match=r"line 2: the prompt is a list of chat messages, but the tokenizer has no"):
        load(rows, tokenizer=char_tokenizer)
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"line 2: roles must alternate"):
        load(rows, tokenizer=bos_tokenizer, chat_template_kwargs={"chat_template": template})
    with pytest.raises(ValueError, match=r"^data\.template is for plain prompts, but .*line 2 holds"):
        load(rows, tokenizer=bos_tokenizer, template="Q: {prompt}")


def test_chat_options_without_chat_prompts_are_refused(load):
    with pytest.raises(ValueError, match=r"^data\.chat_template_kwargs is set, but no prompt of .* is a list"):
        load(numbered(1), chat_template_kwargs={"enable_thinking": False})


def test_chat_options_that_would_cut_the_prompt_are_refused(load):
    with pytest.raises(ValueError, match=r"^data\.chat_template_kwargs must not set truncation"):
        load(numbered(1), chat_template_kwargs={"truncation": True})


def test_a_prompt_of_an_unlimited_tokenizer_fits_the_models_context(load, bos_tokenizer):
    rows = [{"prompt": "x" * size, "answer": "1"} for size in (49, 59)]
    data = load(rows, tokenizer=bos_tokenizer, context_limit=64 - 8)
    assert [len(row.prompt_ids) for row in data.train.rows] == [50]


def test_epochs_bound_the_draws(load):
    assert load(numbered(5), num_epochs=3).train.num_draws == 15
    assert load(numbered(5)).train.num_draws is None


def test_the_seed_orders_the_draws_and_shuffle_can_be_off(load):
    def first(**changes):
        return [load(numbered(20), **changes).train.row_id(draw) for draw in range(20)]

    assert first(seed=1) == first(seed=1) != first(seed=2)
    assert first(shuffle=False) == list(range(20))


def test_another_file_has_another_fingerprint(load):
    same, other = numbered(5), [*numbered(4), {"prompt": "p4", "answer": "other"}]
    assert load(same).train.fingerprint == load(same).train.fingerprint != load(other).train.fingerprint


@pytest.mark.parametrize(("eval_draws", "expected"), [(2, 2), (9, 3)])
def test_held_out_rows_are_drawn_in_file_order_at_most_once(load, write, eval_draws, expected):
    held = write("held.jsonl", [*numbered(2), {"prompt": "", "answer": "1"}, *numbered(1)])
    data = load(numbered(5), heldout_path=held, eval_draws=eval_draws)
    assert data.heldout.num_draws == expected
    assert [data.heldout.row_id(draw) for draw in range(expected)] == list(range(expected))
    assert (data.counts["num_rows"], data.counts["num_heldout_rows"]) == (5, 3)
    assert data.counts["num_heldout_dropped_empty_prompt"] == 1


def test_without_evaluation_there_is_no_held_out_source(load):
    assert load(numbered(2)).heldout is None
    assert load(numbered(2), heldout_path="unread", eval_draws=0).heldout is None


def test_a_held_out_file_with_nothing_left_names_its_key(load, write):
    held = write("held.jsonl", [{"prompt": "", "answer": "1"}])
    with pytest.raises(ValueError, match=r"^data\.heldout_path: no prompt of .*held\.jsonl is left"):
        load(numbered(2), heldout_path=held)
