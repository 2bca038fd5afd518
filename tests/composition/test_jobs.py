"""Runs and sweeps with a stand-in for the job: what runs, what is written where, and how it ends."""

import json
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.jobs import run_jobs
from asynctensorrlhf.composition.sweep import SweepJob

SUMMARY = {"accuracy_before": 0.25, "accuracy_after": 0.875, "num_steps": 3, "train_wall_s": 1.5}


class Interrupted(KeyboardInterrupt):
    """Like the one of the signal handlers."""

    exit_code = 143


class Model:
    """Something big that a failing job must not keep alive."""


class StandIn:
    """A job that records its calls and ends as its seed says: 1 raises, 2 is refused, 3 is interrupted, 4 exits."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.folders: list[Path] = []
        self.places: list[SweepJob | None] = []
        self.models: list[weakref.ref[Model]] = []
        self.were_models_alive: list[bool] = []

    def __call__(self, cfg: DictConfig, run_dir: Path, place: SweepJob | None) -> Mapping[str, Any]:
        self.were_models_alive.append(any(model() is not None for model in self.models))
        model = Model()
        self.models.append(weakref.ref(model))
        self.seeds.append(cfg.seed)
        self.folders.append(run_dir)
        self.places.append(place)
        (run_dir / "config.yaml").touch()
        if cfg.seed == 4:
            raise SystemExit(3)
        errors = {1: RuntimeError("boom"), 2: ConfigError("trainer.device=cuda: not here"), 3: Interrupted()}
        if cfg.seed in errors:
            raise errors[cfg.seed]
        return SUMMARY


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.chdir(tmp_path)
    return StandIn()


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def sweep_records(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def test_a_single_run_gets_its_own_folder_below_outputs(job: StandIn, tmp_path: Path) -> None:
    assert run_jobs([], job) == 0
    assert run_jobs([], job) == 0
    first, second = job.folders
    assert first != second
    assert job.places == [None, None]
    assert first.is_relative_to(tmp_path / "outputs")
    assert not set("=,{}[]()") & set(str(first.relative_to(tmp_path)))
    assert (first / "train.log").is_file()


def test_a_refused_run_says_one_line_writes_nothing_and_exits_with_2(
    job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(["optim.lr=abc"], job) == 2
    assert capsys.readouterr() == ("", "optim.lr=abc: must be a float > 0\n")
    assert job.seeds == []
    assert list(tmp_path.iterdir()) == []


def test_a_secret_is_refused_and_found_nowhere(
    job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "+x.token=made-up-123"
    for argv in ([secret], ["-m", "seed=0,5", secret], ["+x.token={made-up-123"]):
        assert run_jobs(argv, job) == 2
    captured = capsys.readouterr()
    assert "made-up-123" not in captured.out + captured.err
    assert captured.err.count("WANDB_API_KEY") == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("seed", "code", "said"), [(1, 1, "boom"), (2, 2, "trainer.device=cuda"), (3, 143, ""), (4, 1, "sys.exit(3)")]
)
def test_a_failing_run_logs_its_traceback_and_gives_its_exit_code(
    seed: int, code: int, said: str, job: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs([f"seed={seed}"], job) == code
    log, stderr = (job.folders[0] / "train.log").read_text(), capsys.readouterr().err
    assert "Traceback" in log
    assert said in log
    assert stderr.count("Traceback") == {1: 1, 2: 0, 3: 0, 4: 2}[seed]
    assert said in stderr
    if seed == 2:
        assert stderr == "trainer.device=cuda: not here\n"


def test_output_dir_is_refused_the_second_time_and_taken_with_resume(
    job: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(["output_dir=runs/a"], job) == 0
    assert run_jobs(["output_dir=runs/a"], job) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert run_jobs(["output_dir=runs/a", "resume=auto"], job) == 0
    assert job.folders == [Path.cwd() / "runs/a"] * 2


def test_warnings_go_to_the_terminal_and_to_the_log(job: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_jobs(["loss=m2po", "loss.ratio_sq_threshold=1.2"], job) == 0
    assert capsys.readouterr().err.startswith("WARNING: loss.ratio_sq_threshold=1.2")
    assert "loss.ratio_sq_threshold=1.2" in (job.folders[0] / "train.log").read_text()


def test_a_failing_job_of_a_sweep_stops_no_other_and_has_its_traceback_in_its_own_log(
    job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(["-m", "seed=0,1,5", "output_dir=runs/s"], job) == 1
    sweep = tmp_path / "runs" / "s"
    assert job.seeds == [0, 1, 5]
    assert job.folders == [sweep / "0", sweep / "1", sweep / "2"]
    assert [place.number for place in job.places if place is not None] == [0, 1, 2]
    assert {place.sweep_dir for place in job.places if place is not None} == {sweep}
    logs = [(sweep / str(number) / "train.log").read_text() for number in range(3)]
    assert ["RuntimeError: boom" in log for log in logs] == [False, True, False]
    records = sweep_records(sweep)
    assert [record["exit_code"] for record in records] == [0, 1, 0]
    assert [record["error"] for record in records] == [None, "RuntimeError: boom", None]
    assert records[2]["overrides"] == ["seed=5", "output_dir=runs/s"]
    assert records[0]["summary"] == SUMMARY
    assert "0.250 -> 0.875" in capsys.readouterr().out


def test_a_failed_job_of_a_sweep_keeps_nothing_alive(job: StandIn) -> None:
    assert run_jobs(["-m", "seed=0,1,5"], job) == 1
    assert job.were_models_alive == [False, False, False]


@pytest.mark.parametrize(
    "swept", ["optim.lr=1e-3,abc,1e-4", "loss=ppo,ppoo,grpo", "+loss.extra=choice(1)", "trainer.stpes=3,4"]
)
def test_refused_jobs_of_a_sweep_fail_alone_and_all_refused_is_one_line(
    swept: str, job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(["-m", swept, "seed=7", "output_dir=runs/s"], job) == 2
    if "abc" not in swept and "ppoo" not in swept:
        assert capsys.readouterr().err.count("\n") == 1
        assert files_below(tmp_path) == []
        return
    assert job.seeds == [7, 7]
    assert [folder.name for folder in job.folders] == ["0", "2"]
    bad = next(value for value in swept.partition("=")[2].split(",") if value in ("abc", "ppoo"))
    assert bad in (tmp_path / "runs/s/1/train.log").read_text()
    records = sweep_records(tmp_path / "runs/s")
    assert [record["exit_code"] for record in records] == [0, 2, 0]
    assert bad in records[1]["error"]
    assert records[1]["overrides"][0].endswith(bad)


def test_an_interrupted_job_ends_the_sweep_and_the_rest_is_listed(job: StandIn, tmp_path: Path) -> None:
    assert run_jobs(["-m", "seed=0,3,5", "output_dir=runs/s"], job) == 143
    assert job.seeds == [0, 3]
    records = sweep_records(tmp_path / "runs/s")
    assert [record["exit_code"] for record in records] == [0, 143, None]


def test_a_key_that_only_the_swept_options_have_can_be_set_for_all_of_them(job: StandIn) -> None:
    """Hydra by itself applies it to the default option first, which does not have it."""
    assert run_jobs(["-m", "loss=ppo,grpo", "loss.aggregation=token_sum", "logger.name='a b'"], job) == 0
    assert len(job.seeds) == 2


def test_a_used_sweep_folder_is_refused(job: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_jobs(["output_dir=runs/single"], job) == 0
    assert run_jobs(["-m", "seed=0,5", "output_dir=runs/single"], job) == 2
    assert run_jobs(["-m", "seed=0,5", "output_dir=runs/s"], job) == 0
    assert run_jobs(["-m", "seed=0,5", "output_dir=runs/s"], job) == 2
    assert run_jobs(["output_dir=runs/s"], job) == 2
    assert capsys.readouterr().err.count("already holds a run") == 3
    assert run_jobs(["-m", "seed=0,5", "output_dir=runs/s", "resume=auto"], job) == 0


def test_flags_and_overrides_come_in_any_order(job: StandIn) -> None:
    assert run_jobs(["loss=ppo", "-m", "seed=0,5"], job) == 0
    assert job.seeds == [0, 5]


@pytest.mark.parametrize("argv", [["--cfg", "job"], ["--info", "searchpath"], ["--hydra-help"], ["--help"]])
def test_looking_runs_nothing_and_writes_nothing(
    argv: list[str], job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(argv, job) == 0
    assert job.seeds == []
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert captured.out


def test_help_shows_groups_keys_comments_and_rules_of_the_chosen_options(
    job: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(["--help", "loss=ppo"], job) == 0
    text = capsys.readouterr().out
    assert "opsm, ppo*, reinforce" in text
    assert "loss.dual_clip=null" in text
    assert "Peak learning rate. [float > 0]" in text
    assert "ratio_sq_threshold" not in text


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--cfg", "jobb"], "invalid choice"),
        (["--multirn"], "--multirn: unknown flag; did you mean --multirun?"),
        (["--cfg", "job", "steps=3"], "did you mean trainer.num_steps?"),
        (["--config-dir", "nowhere"], "--config-dir nowhere: no such folder"),
        (["--config-name", "nowhere"], "--config-name nowhere"),
        (["--help", "loss=ppoo"], "loss=ppoo: unknown option"),
        (["-m", "seed=range(1,3"], "seed=range(1,3: cannot be read"),
        (["hydra.foo=1", "-m", "seed=1,2"], "hydra.foo=1: unknown key"),
    ],
)
def test_bad_flags_are_one_line(
    argv: list[str], fragment: str, job: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_jobs(argv, job) == 2
    stderr = capsys.readouterr().err
    assert fragment in stderr
    assert stderr.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(
    job: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_jobs(["output_dir=file/a"], job) == 2
    assert capsys.readouterr().err.startswith("output_dir: ")
    assert os.listdir(tmp_path) == ["file"]
