"""What the README shows is what one can do: every command and the library example run, shortened."""

import re
import shutil
from pathlib import Path

import pytest

from asynctensorrlhf.cli import COMMANDS, train_job
from asynctensorrlhf.composition.jobs import run_jobs
from asynctensorrlhf.warm_start import tiny_llama_path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TEXT, flags=re.DOTALL)
LINES = [line.split("#")[0].strip() for kind, block in BLOCKS if kind == "console" for line in block.splitlines()]
COMMAND_LINES = [line for line in LINES if line.startswith("atrlhf ")]
SHORT = ("trainer.num_steps=2", "trainer.eval_draws=8", "logger.mode=disabled", "trainer.groups_per_step=2")


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    """Where somebody who follows the README types: with the files that it speaks of."""
    (tmp_path / "my.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n' * 8, encoding="utf-8")
    shutil.copytree(tiny_llama_path(), tmp_path / "my_model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_every_command_runs(line, users_folder):
    _, command, *arguments = line.split()
    assert command in COMMANDS
    shortened = [] if "--help" in arguments else SHORT
    assert run_jobs([*arguments, *shortened], train_job) == 0


def test_the_example_of_library_use_runs(users_folder, capsys):
    (example,) = (block for kind, block in BLOCKS if kind == "python")
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out in ("0.0\n", "1.0\n")


def test_every_make_target_it_names_exists_and_is_run_by_ci_or_setup():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)", TEXT))
    assert {"demo", "test", "demo-real"} <= named <= targets
    in_ci = (ROOT / ".ci" / "run").read_text()
    assert all(re.search(rf"make .*\b{target}\b", in_ci) for target in named - {"setup"})


def test_the_options_of_every_group_are_listed():
    for group in (ROOT / "conf").iterdir():
        for option in group.glob("*.yaml") if group.is_dir() else ():
            assert f"`{option.stem}`" in TEXT
