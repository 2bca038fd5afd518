import subprocess
import sys
from pathlib import Path

import pytest

from asynctensorrlhf.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


def run_in(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    script = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from asynctensorrlhf.cli import main
code = main({list(argv)!r})
assert not {{"torch", "transformers", "accelerate", "wandb"}} & set(sys.modules), "something heavy was imported"
sys.exit(code)
"""
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_bad_value_ends_the_module_with_2_one_line_and_no_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "asynctensorrlhf.cli", "train", "optim.lr=abc"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "optim.lr=abc: must be a float > 0\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["train", "--help"], ["train", "--cfg", "job"]])
def test_looking_imports_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    done = run_in(tmp_path, *argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_refusal_imports_nothing_heavy(tmp_path: Path) -> None:
    done = run_in(tmp_path, "train", "loss=ppoo")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "atrlhf trian: unknown command; did you mean train?\n"


def test_no_command_shows_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
