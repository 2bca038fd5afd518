"""The checker of reference vectors: what passes, and that nothing that is wrong does."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asynctensorrlhf.bench.vectors.check import faults, read_vectors
from asynctensorrlhf.bench.vectors.runners import RUNNERS

FILE = Path(__file__).parents[1] / "golden" / "loss_vectors.json"
VECTORS: dict[str, dict[str, Any]] = {
    vector["id"]: vector for vector in json.loads(FILE.read_text(encoding="utf-8"))["vectors"]
}
TOLERANCES = read_vectors(FILE).tolerances
EACH = pytest.mark.parametrize("name", VECTORS)


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asynctensorrlhf.bench.vectors", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def write(path: Path, **changes: Any) -> Path:
    content = {**json.loads(FILE.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to every number and truth value."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))
    elif isinstance(value, (bool, int, float)):
        yield path


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(vector: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """A copy with one number moved by 1e-6, or one truth value turned."""
    other = copy.deepcopy(vector)
    parent, value = at(other, path[:-1]), at(other, path)
    parent[path[-1]] = (not value) if isinstance(value, bool) else value + 1e-6
    return other


def is_compared(vector: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Gradients where a clip is a tie are not."""
    ties = vector["expected"].get("grad_tie_positions", ())
    return not (str(path[1]).startswith("grad_logp") and list(path[2:]) in ties)


def test_every_vector_has_a_runner_and_every_runner_a_vector() -> None:
    assert RUNNERS.keys() == VECTORS.keys()


@EACH
def test_the_vector_passes_in_both_precisions(name: str) -> None:
    assert set(TOLERANCES) == {torch.float64, torch.float32}
    assert faults(VECTORS[name], TOLERANCES) == []


@EACH
def test_one_expected_value_changed_by_a_millionth_fails(name: str) -> None:
    vector = VECTORS[name]
    every = [path for path in places(vector["expected"], ("expected",)) if is_compared(vector, path)]
    assert every
    # all of the small ones, and a share of the large: each goes through the same comparison
    for path in every[:: max(1, len(every) // 25)]:
        assert faults(changed(vector, path), TOLERANCES), path


@EACH
def test_an_unknown_key_anywhere_fails(name: str) -> None:
    for branch in ("config", "inputs", "expected"):
        vector = copy.deepcopy(VECTORS[name])
        vector[branch]["unheard_of"] = 1.0
        assert faults(vector, TOLERANCES), branch
    assert faults({**VECTORS[name], "unheard_of": 1.0}, TOLERANCES)


@EACH
def test_a_missing_branch_or_key_fails(name: str) -> None:
    for branch in ("config", "inputs", "expected"):
        assert faults({key: part for key, part in VECTORS[name].items() if key != branch}, TOLERANCES)
    for key in VECTORS[name]["inputs"]:
        vector = copy.deepcopy(VECTORS[name])
        del vector["inputs"][key]
        assert faults(vector, TOLERANCES), key


def test_constants_come_from_the_config() -> None:
    for name, key in (
        ("ppo_clip_token_mean", "eps_high"),
        ("m2po_second_moment_mask", "m2_threshold"),
        ("gae_value_clip", "lam"),
        ("grpo_population_std_k3_kl", "beta"),
    ):
        vector = copy.deepcopy(VECTORS[name])
        vector["config"][key] *= 0.5
        assert faults(vector, TOLERANCES), name


@pytest.mark.parametrize("junk", [7, None, [], {}, {"id": 3}, "text"])
def test_what_is_no_vector_fails(junk: Any) -> None:
    assert faults(junk, TOLERANCES)


def test_an_unknown_id_fails_with_its_name() -> None:
    (fault,) = faults({**VECTORS["gspo"], "id": "gpso"}, TOLERANCES)
    assert "unknown id 'gpso'" in fault
    assert "gspo" in fault


def test_the_command_prints_a_line_a_vector_and_the_count_last() -> None:
    done = check(str(FILE))
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[-1] == f"{len(VECTORS)} of {len(VECTORS)} vectors pass"
    assert [line.partition(":")[0] for line in lines[:-1]] == list(VECTORS)


def test_the_command_counts_what_fails_and_exits_with_another_code(tmp_path: Path) -> None:
    vectors = [VECTORS["gspo"], changed(VECTORS["gspo"], ("expected", "loss")), {**VECTORS["gspo"], "id": "new"}]
    done = check(str(write(tmp_path / "some.json", vectors=vectors)))
    assert done.returncode not in (0, None)
    assert done.stdout.splitlines()[-1] == "1 of 3 vectors pass"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema_version": 1, "vectors": []}', '{"a": NaN}', '{"a": 1, "a": 2}']
)
def test_a_file_that_is_none_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    done = check(str(path))
    assert done.returncode not in (0, None)
    assert "Traceback" not in done.stderr
    assert "of 0 vectors pass" not in done.stdout or done.stdout.splitlines()[-1] == "0 of 0 vectors pass"


def test_a_missing_file_or_argument_is_an_error(tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "none.json")], []):
        done = check(*arguments)
        assert done.returncode not in (0, None)
        assert "Traceback" not in done.stderr
