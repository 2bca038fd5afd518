import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, cwd):
    # Only the installed package may be found: not the checkout, nor what the tests put on the path.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the sdist, as an index would receive both."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT), cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def empty_env(wheel, tmp_path_factory):
    """A new environment with the wheel alone, then given this environment's libraries: neither network nor copies."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    python = Path(paths["scripts"]) / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(sys.executable, "-m", "pip", "--python", str(python), *install, cwd=folder)
    libraries = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (Path(paths["purelib"]) / "libraries.pth").write_text("\n".join(sorted(libraries)))
    return python.parent


def test_wheel_holds_every_config_file_and_the_warm_start(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "asynctensorrlhf/warm_start/tiny_llama").iterdir()]
    relative = {path.relative_to(ROOT).as_posix() for path in shipped}
    assert len(relative) > 20
    missing = {name for name in relative if name.replace("conf/", "asynctensorrlhf/conf/", 1) not in names}
    assert not missing


def test_wheel_holds_only_the_package_and_its_metadata(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"asynctensorrlhf", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}


def test_installed_package_is_the_wheel_and_knows_its_warm_start(empty_env, tmp_path):
    where = "from asynctensorrlhf.warm_start import tiny_llama_path; print(tiny_llama_path())"
    printed = Path(run(str(empty_env / "python"), "-c", where, cwd=tmp_path).strip())
    assert printed.is_relative_to(empty_env.parent)
    assert (printed / "model.safetensors").is_file()


def test_installed_command_says_what_it_can_do(empty_env, tmp_path):
    assert "train" in run(str(empty_env / "atrlhf"), "--help", cwd=tmp_path)


def test_installed_command_trains_from_another_folder(empty_env, tmp_path):
    job = ["trainer.num_steps=2", "trainer.eval_draws=16", "logger.mode=disabled"]
    run(str(empty_env / "atrlhf"), "train", *job, cwd=tmp_path)
    (summary,) = tmp_path.rglob("summary.json")
    assert json.loads(summary.read_text())["num_steps"] == 2


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs a git checkout")
def test_top_level_of_the_project_holds_what_the_design_lists():
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    assert {name.split("/")[0] for name in listed} == {
        ".ci",
        ".gitignore",
        "CITATION.cff",
        "LICENSE",
        "Makefile",
        "README.md",
        "asynctensorrlhf",
        "conf",
        "outputs",
        "pyproject.toml",
        "tests",
    }
    assert [name for name in listed if name.startswith("outputs/")] == ["outputs/.gitkeep"]


def test_citation_names_the_version_of_the_package(wheel):
    version = wheel.name.split("-")[1]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
