import json
import sys

import pytest

from asynctensorrlhf.data.jsonl import jsonl
from asynctensorrlhf.data.parquet import parquet

TEMPLATE = "{% for m in messages %}{% if m.tool_calls is defined %}X{% else %}{{ m.content }}{% endif %}{% endfor %}"
CHAT_ROWS = [
    {
        "prompt": [
            {"role": "user", "content": "first"},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]},
        ],
        "answer": "007",
        "meta": {"a": 1},
    },
    {"prompt": [{"role": "user", "content": "second"}], "answer": "1e3", "meta": {"b": [1.5, 2.0]}},
]
PLAIN_ROWS = [
    {"prompt": "What is 1 + 1?", "answer": "2", "n": 1},
    {"prompt": "", "answer": "3", "n": 2},
    {"prompt": "caf\u00e9\u2028", "answer": "007", "n": 3},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_arrow(rows, path):
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(rows), path)


def write_datasets(rows, path):
    """As `datasets` converts a JSONL file: message lists become cells of JSON."""
    from datasets import Dataset, Features, Json, List, Value

    kinds = {
        "prompt": List(Json()) if isinstance(rows[0]["prompt"], list) else Value("string"),
        "meta": Json(),
    }
    features = {name: kinds.get(name, Value("int64" if name == "n" else "string")) for name in rows[0]}
    Dataset.from_list(rows, features=Features(features)).to_parquet(path)


@pytest.fixture
def load_both(tmp_path, defaults):
    """The same rows by way of both formats."""

    def call(rows, write, **changes):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        write(rows, str(tmp_path / "rows.parquet"))
        keys = {**defaults, **changes}
        from_json = jsonl(**keys, path=str(tmp_path / "rows.jsonl"))
        return from_json, parquet(**keys, path=str(tmp_path / "rows.parquet"))

    return call


def assert_equal(from_json, from_parquet):
    assert from_json.train.fingerprint == from_parquet.train.fingerprint
    assert from_json.counts == from_parquet.counts
    for left, right in zip(from_json.train.rows, from_parquet.train.rows, strict=True):
        assert left.prompt_ids.tolist() == right.prompt_ids.tolist()
        assert left.columns == right.columns


@pytest.mark.parametrize("write", [write_arrow, write_datasets])
def test_chat_rows_have_the_ids_and_columns_of_the_same_rows_in_jsonl(load_both, bos_tokenizer, write):
    changes = {"tokenizer": bos_tokenizer, "chat_template_kwargs": {"chat_template": TEMPLATE}}
    from_json, from_parquet = load_both(CHAT_ROWS, write, **changes)
    assert_equal(from_json, from_parquet)
    assert [row.text for row in from_parquet.train.rows] == ["firstX", "second"]
    assert from_parquet.train.rows[1].columns["prompt"] == CHAT_ROWS[1]["prompt"]


@pytest.mark.parametrize("write", [write_arrow, write_datasets])
def test_plain_rows_have_the_ids_and_columns_of_the_same_rows_in_jsonl(load_both, write):
    from_json, from_parquet = load_both(PLAIN_ROWS, write)
    assert_equal(from_json, from_parquet)
    assert [row.columns["answer"] for row in from_parquet.train.rows] == ["2", "007"]


def test_numbers_are_spelt_as_python_writes_them(tmp_path, defaults):
    for golds, expected in (
        ([7, 30], ["7", "30"]),
        ([2.5, 3.0], ["2.5", "3.0"]),
        ([[1, 2], [3]], [["1", "2"], ["3"]]),
    ):
        write_arrow([{"prompt": "p", "answer": gold} for gold in golds], str(tmp_path / "n.parquet"))
        data = parquet(**defaults, path=str(tmp_path / "n.parquet"))
        assert [row.columns["answer"] for row in data.train.rows] == expected


@pytest.mark.parametrize("golds", [[True, False], ["a", None], [float("nan"), 1.0]])
def test_an_answer_without_one_text_is_refused_with_its_row(tmp_path, defaults, golds):
    write_arrow([{"prompt": "p", "answer": gold} for gold in golds], str(tmp_path / "n.parquet"))
    with pytest.raises(ValueError, match=r"^data\.answer_column: .*n\.parquet, row [12]: the answer must be a text"):
        parquet(**defaults, path=str(tmp_path / "n.parquet"))


def test_a_missing_column_lists_those_present(tmp_path, defaults):
    write_arrow([{"question": "p", "answer": "1"}], str(tmp_path / "n.parquet"))
    with pytest.raises(ValueError, match=r"^data\.prompt_column .*it has question, answer"):
        parquet(**defaults, path=str(tmp_path / "n.parquet"))


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path, defaults):
    (tmp_path / "split=train").mkdir()
    write_arrow([{"prompt": "p", "answer": "1"}], str(tmp_path / "split=train" / "n.parquet"))
    data = parquet(**defaults, path=str(tmp_path / "split=train" / "n.parquet"))
    assert data.train.rows[0].columns == {"prompt": "p", "answer": "1"}


def test_a_missing_file_and_another_format_name_the_key(tmp_path, defaults):
    with pytest.raises(ValueError, match=r"^data\.path must name a readable file, got .*none\.parquet"):
        parquet(**defaults, path=str(tmp_path / "none.parquet"))
    (tmp_path / "text.parquet").write_text('{"prompt": "p"}\n' * 9)
    with pytest.raises(ValueError, match=r"^data\.path must name a parquet file, got .*text\.parquet"):
        parquet(**defaults, path=str(tmp_path / "text.parquet"))


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch, defaults):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'asynctensorrlhf\[datasets\]'"):
        parquet(**defaults, path="any.parquet")
