import json
import os

import pytest

from asynctensorrlhf.telemetry.json_lines import JsonLines
from asynctensorrlhf.telemetry.summary import write_json

ODD_TEXT = "a\u2028b\u0085\x00\n\N{GRINNING FACE} \ud800 \ud83d\ude00"


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_every_row_is_one_line_of_strict_json_whatever_it_holds(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append([{"text": ODD_TEXT}, {"nan": float("nan"), "inf": [1, -float("inf")], "path": tmp_path}])
    lines.close()
    data = (tmp_path / "rows.jsonl").read_bytes()
    assert len(data.decode("ascii").splitlines()) == 2
    first, second = (json.loads(line, parse_constant=refuse) for line in data.splitlines())
    assert first["text"] == "a\u2028b\u0085\x00\n\N{GRINNING FACE} \ufffd \N{GRINNING FACE}"
    assert second == {"nan": None, "inf": [1, None], "path": str(tmp_path)}


def test_a_row_is_in_the_file_before_it_is_closed(tmp_path):
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append([{"step": 1}])
    assert (tmp_path / "rows.jsonl").read_text() == '{"step": 1}\n'
    lines.close()


def test_a_row_cut_off_by_a_kill_does_not_swallow_the_next_one(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    lines = JsonLines(path)
    lines.append([{"step": 2}])
    lines.close()
    assert path.read_text().splitlines() == ['{"step": 1}', '{"ste', '{"step": 2}']


class HalfFullDisk:
    """A file that takes half of what it is given, then nothing, as a disk does when it fills up."""

    def __init__(self, path):
        self.file, self.is_full = open(path, "ab+", buffering=0), True  # noqa: SIM115

    def write(self, data):
        return self.file.write(data[: len(data) // 2] if self.is_full else data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_row_the_disk_took_half_of_is_taken_back(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    lines._file.close()
    disk = lines._file = HalfFullDisk(path)
    with pytest.raises(OSError, match="no space left"):
        lines.append([{"step": 1, "a": "b"}])
    disk.is_full = False
    lines.append([{"step": 2}])
    lines.close()
    assert path.read_text() == '{"step": 2}\n'


def test_a_summary_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"accuracy_after": 0.5})
    with pytest.raises(TypeError):
        write_json(path, {"accuracy_after": object()})
    assert json.loads(path.read_text()) == {"accuracy_after": 0.5}
    with open(path) as reader:
        write_json(path, {"accuracy_after": float("nan"), "groups": {"dropped": {}}})
        assert json.load(reader) == {"accuracy_after": 0.5}, "a reader saw a file that was being written"
    assert json.loads(path.read_text()) == {"accuracy_after": None, "groups": {"dropped": {}}}
    assert os.listdir(tmp_path) == ["summary.json"]
