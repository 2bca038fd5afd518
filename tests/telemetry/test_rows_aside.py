import json
import os
import signal
import subprocess
import sys

from asynctensorrlhf.telemetry.rows_aside import move_rows_aside

WRITER = """
import os, signal, sys
from pathlib import Path
from asynctensorrlhf.telemetry.json_lines import JsonLines
path = Path(sys.argv[1])
lines = JsonLines(path)
for step in range(1, 9):
    lines.append([{"step": step, "reward/mean": 0.125}])
os.write(lines._file.fileno(), b'{"step": 9, "rew')
os.kill(os.getpid(), signal.SIGKILL)
"""


def steps_of(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_rows_past_the_checkpoint_are_moved_with_the_row_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.run([sys.executable, "-c", WRITER, str(path)], env=environment, timeout=120)
    assert writer.returncode == -signal.SIGKILL
    aside = move_rows_aside(path, 5)
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert aside == tmp_path / "metrics.after_step_5.jsonl"
    *whole, torn = aside.read_text().splitlines()
    assert [json.loads(row)["step"] for row in whole] == [6, 7, 8]
    assert torn == '{"step": 9, "rew'
    assert sorted(os.listdir(tmp_path)) == ["metrics.after_step_5.jsonl", "metrics.jsonl"]


def test_rows_of_a_second_crash_get_a_file_of_their_own(tmp_path):
    path = tmp_path / "samples.jsonl"
    for crash in range(3):
        with open(path, "a") as file:
            file.writelines(f'{{"step": {step}, "crash": {crash}}}\n' for step in (5, 6))
        path_of_rows = move_rows_aside(path, 5)
        assert f'"crash": {crash}' in path_of_rows.read_text()
    names = {"samples.after_step_5.jsonl", "samples.after_step_5.2.jsonl", "samples.after_step_5.3.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "samples.jsonl"}
    assert all(steps_of(tmp_path / name) == [6] for name in names)


def test_nothing_is_moved_when_no_row_is_past_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert move_rows_aside(path, 5) is None
    assert not path.exists()
    path.write_text('{"step": 5}\n')
    assert move_rows_aside(path, 5) is None
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert path.read_text() == '{"step": 5}\n'


def test_a_whole_last_row_without_its_newline_stays_and_gets_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 4}\n\x00\x00\n{"step": 5}')
    aside = move_rows_aside(path, 5)
    assert path.read_bytes() == b'{"step": 4}\n{"step": 5}\n'
    assert aside.read_bytes() == b"\x00\x00\n"
