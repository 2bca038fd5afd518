import pytest

from asynctensorrlhf.data.jsonl import jsonl

BOM = b"\xef\xbb\xbf"


def numbered(count):
    return [{"prompt": f"p{i}", "answer": str(i)} for i in range(count)]


def test_lines_end_at_newlines_only(load):
    rows = ['{"prompt": "a\u2028b\u0085c", "answer": "x"}', '{"prompt": "d", "answer": "y"}']
    data = load(rows)
    assert [row.columns["prompt"] for row in data.train.rows] == ["a\u2028b\u0085c", "d"]


def test_byte_order_marks_crlf_and_blank_lines_change_nothing(load):
    plain = load(numbered(3))
    first, second, third = (b'{"prompt": "p%d", "answer": "%d"}' % (i, i) for i in range(3))
    dressed = load(BOM + first + b"\r\n" + second + b"\r\n\r\n  \r\n" + BOM + third + b"\r\n")
    assert dressed.train.fingerprint == plain.train.fingerprint
    assert dressed.counts["num_blank_lines"] == 2
    assert plain.counts["num_blank_lines"] == 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a" "answer": 1}', "not valid JSON: Expecting ',' delimiter at column 16"),
        ('["a", "b"]', "must be one JSON object"),
        ('{"prompt": "a", "prompt": "b"}', "key 'prompt' occurs twice"),
        ('{"prompt": "a", "meta": {"x": 1, "x": 2}}', "key 'x' occurs twice"),
        ('{"prompt": "a\\ud83d"}', "surrogates not allowed"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line_number(load, line, reason):
    with pytest.raises(ValueError, match=r"^data\.path: .*my\.jsonl, line 3: ") as caught:
        load([numbered(1)[0], "", line, numbered(1)[0]])
    assert reason in str(caught.value)


def test_a_line_that_is_not_utf8_is_an_error_with_its_number(load):
    with pytest.raises(ValueError, match=r"line 2: 'utf-8' codec"):
        load(b'{"prompt": "a", "answer": "b"}\n{"prompt": "caf\xe9", "answer": "b"}')


def test_a_missing_file_names_its_key(load, tmp_path):
    with pytest.raises(ValueError, match=r"^data\.path must name a readable file, got .*no_such.*No such file"):
        load(numbered(1), path=str(tmp_path / "no_such"))
    with pytest.raises(ValueError, match=r"^data\.heldout_path must name a readable file"):
        load(numbered(1), heldout_path=str(tmp_path / "no_such"))


def test_a_relative_path_starts_at_the_current_folder(tmp_path, monkeypatch, defaults, write):
    write("near.jsonl", numbered(2))
    monkeypatch.chdir(tmp_path)
    assert len(jsonl(**defaults, path="near.jsonl").train.rows) == 2


def test_a_missing_column_is_an_error_that_lists_those_present(load):
    with pytest.raises(ValueError, match=r"^data\.prompt_column .* got 'prompt'; it has question, answer$"):
        load([{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=r"^data\.answer_column .*it has prompt, Answer; did you mean 'Answer'\?"):
        load([{"prompt": "a", "Answer": "b"}])
    with pytest.raises(ValueError, match=r"did you mean 'prompt'\?"):
        load(numbered(1), prompt_column="PROMPTS")


def test_every_column_travels_with_its_own_row(load):
    rows = [{"prompt": "same", "answer": str(i), "meta": {"id": i, "tags": [i, None]}} for i in range(5)]
    data = load(rows)
    for draw in range(12):
        row = data.train.rows[data.train.row_id(draw)]
        assert row.columns["meta"] == {
            "id": int(row.columns["answer"]),
            "tags": [int(row.columns["answer"]), None],
        }


def test_a_nested_null_is_absent_as_it_is_in_a_columnar_file(load):
    data = load([{"prompt": "a", "answer": "1", "meta": {"x": None, "y": [{"z": None}, 2]}, "hint": None}])
    assert data.train.rows[0].columns["meta"] == {"y": [{}, 2]}
    assert data.train.rows[0].columns["hint"] is None


def test_rows_with_equal_prompts_stay_separate(load):
    data = load([{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": "2"}])
    assert [row.columns["answer"] for row in data.train.rows] == ["1", "2"]


def test_a_column_that_only_other_rows_have_is_none(load):
    data = load([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2", "hint": "h"}])
    assert [row.columns["hint"] for row in data.train.rows] == [None, "h"]


GOLDS = {
    "7": "7",
    '"007"': "007",
    '"1e3"': "1e3",
    '"2024-01-05"': "2024-01-05",
    "2.5": "2.5",
    "3": "3",
    "12345678901234567890123": "12345678901234567890123",
    "1e3": "1e3",
    "-0.50": "-0.50",
    "-0": "-0",
    '" x "': " x ",
}


@pytest.mark.parametrize("step", [1, -1])
def test_an_answer_is_the_exact_text_of_its_row_whatever_other_rows_hold(load, step):
    data = load([f'{{"prompt": "p", "answer": {gold}, "n": 1e3}}' for gold in list(GOLDS)[::step]])
    assert [row.columns["answer"] for row in data.train.rows] == list(GOLDS.values())[::step]
    assert data.train.rows[0].columns["n"] == 1000.0


def test_a_list_of_accepted_answers_is_a_list_of_exact_texts(load):
    data = load(['{"prompt": "p", "answer": ["0.50", 0.50, 7]}'])
    assert data.train.rows[0].columns["answer"] == ["0.50", "0.50", "7"]


@pytest.mark.parametrize("gold", ["true", "null", "[]", "[null]", '{"a": 1}', "NaN", "[[1]]"])
def test_an_answer_without_one_text_is_refused_with_its_line(load, gold):
    with pytest.raises(ValueError, match=r"^data\.answer_column: .*my\.jsonl, line 2: the answer must be a text"):
        load([numbered(1)[0], f'{{"prompt": "p", "answer": {gold}}}'])


def test_a_row_that_lacks_its_answer_is_refused_with_its_line(load):
    with pytest.raises(ValueError, match=r"line 2: the answer must be"):
        load([numbered(1)[0], {"prompt": "p"}])


def test_without_an_answer_column_rows_need_none(load):
    data = load([{"prompt": "p", "answer": None}], answer_column=None)
    assert data.train.rows[0].columns == {"prompt": "p", "answer": None}
