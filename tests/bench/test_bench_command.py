"""`atrlhf bench`: its help and refusals, its result file, and the arithmetic of pairs and peaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asynctensorrlhf.bench.command import run
from asynctensorrlhf.bench.memory import peak_bytes
from asynctensorrlhf.bench.timing import time_pairs
from asynctensorrlhf.composition.paths import conf_dir

CPU = torch.device("cpu")


def test_help_names_the_measurement_and_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "atrlhf bench" in text
    assert "losses" in text
    assert "output_dir" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["loses"], ["bench loses: must be one of losses", "did you mean losses?"]),
        (["losses", "pears=3"], ["pears=3: unknown key"]),
        (["losses", "device=tpu"], ["device=tpu"]),
    ],
)
def test_a_bad_command_is_one_line_and_exits_with_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert all(word in text for word in words)


def test_pairs_run_both_in_turn_and_take_medians() -> None:
    order: list[str] = []
    pairs = time_pairs(lambda: order.append("a"), lambda: order.append("b"), num_pairs=3, device=CPU)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"
    assert pairs.baseline_s >= 0
    assert pairs.ratio > 0


def test_a_peak_counts_what_is_alive_at_once_and_not_the_inputs() -> None:
    values = torch.zeros(1000)

    def two_at_once() -> torch.Tensor:
        first = values + 1
        second = first + 1
        return first + second

    def one_after_the_other() -> None:
        for _ in range(3):
            del_me = values + 1
            del del_me

    assert peak_bytes(two_at_once, values) == 3 * 4000
    assert peak_bytes(one_after_the_other, values) == 4000


def test_a_short_measurement_prints_every_preset_and_writes_its_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["num_pairs=1", "vocabulary_size=50", "chunk_tokens=64"]
    assert run(["losses", *small, f"output_dir={tmp_path / 'bench'}"]) == 0
    text = capsys.readouterr().out
    result = json.loads((tmp_path / "bench" / "result.json").read_text(encoding="utf-8"))
    presets = {path.stem for path in conf_dir().glob("loss/*.yaml")}
    assert all(preset in text for preset in presets)
    assert presets <= set(_names(result))
    assert run(["losses", *small, f"output_dir={tmp_path / 'bench'}"]) == 2
    assert "holds a result.json already" in capsys.readouterr().err


def _names(value: object) -> list[str]:
    if isinstance(value, dict):
        return [*map(str, value), *(name for part in value.values() for name in _names(part))]
    return [name for part in value for name in _names(part)] if isinstance(value, list) else []
