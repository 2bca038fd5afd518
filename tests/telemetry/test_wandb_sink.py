import json
import os
import subprocess
import sys

import pytest

from asynctensorrlhf.telemetry.wandb_sink import has_key, resolve_mode
from asynctensorrlhf.types import StepReport

KEY = {"WANDB_API_KEY": "made-up-123", "NETRC": os.devnull}
NO_KEY = {"NETRC": os.devnull}


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        ("auto", NO_KEY, "offline"),
        ("auto", KEY, "online"),
        ("auto", {**KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {**KEY, "WANDB_MODE": "disabled"}, "disabled"),
        ("auto", {**NO_KEY, "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {**NO_KEY, "WANDB_MODE": ""}, "offline"),
        ("online", {**KEY, "WANDB_MODE": "offline"}, "online"),
        ("offline", KEY, "offline"),
        ("disabled", KEY, "disabled"),
    ],
)
def test_the_mode_follows_config_then_environment_then_login(mode, environment, expected):
    assert resolve_mode(mode, environment) == expected


@pytest.mark.parametrize(("mode", "environment"), [("online", NO_KEY), ("auto", {**NO_KEY, "WANDB_MODE": "online"})])
def test_online_without_a_key_is_refused_in_one_line(mode, environment):
    with pytest.raises(ValueError, match=r"^logger\.mode is .*no W&B key was found.*logger\.mode=offline$"):
        resolve_mode(mode, environment)


def test_an_unknown_mode_is_refused_naming_those_there_are():
    with pytest.raises(ValueError, match=r"^logger\.mode must be one of auto, .*, got 'onlin'$"):
        resolve_mode("onlin", NO_KEY)


def test_a_key_in_netrc_counts_only_for_the_right_host(tmp_path):
    path = tmp_path / "netrc"
    path.write_text("machine api.wandb.ai login user password made-up-123\n")
    path.chmod(0o600)
    own = {"NETRC": str(path), "WANDB_BASE_URL": "https://wandb.example.org:8080/"}
    assert has_key({"NETRC": str(path)})
    assert not has_key(own)
    path.write_text("machine wandb.example.org:8080 login user password made-up-123\n")
    assert has_key(own)
    path.write_text("machine\n")
    assert not has_key(own)


def test_a_run_is_named_after_its_folder_and_told_our_own_step(wandb, start, tmp_path):
    with start(config={"seed": 3, "hub": {"token": "made-up-123"}}) as telemetry:
        telemetry.log(StepReport(step=1, policy_version=0, metrics={"reward/mean": 0.25}))
    (run,) = wandb.runs
    assert run.options["name"] == tmp_path.name
    assert run.options["config"] == {"seed": 3, "hub": {"token": "***"}}
    assert run.options["dir"] == str(tmp_path)
    assert not {"group", "resume"} & set(run.options)
    assert run.step_metrics == {"step": None, "*": "step"}
    assert run.server["rows"] == [{"step": 1, "policy_version": 0, "reward/mean": 0.25}]


def test_each_job_of_a_sweep_has_a_run_of_its_own_in_the_right_state(wandb, start, tmp_path):
    for job in range(3):
        folder = tmp_path / str(job)
        folder.mkdir()
        try:
            with start(folder=folder, config={"seed": job}, sweep=("12-00-00", job)) as telemetry:
                telemetry.log(StepReport(step=1, policy_version=0, metrics={"job": float(job)}))
                if job == 1:
                    raise RuntimeError("this job fails")
        except RuntimeError:
            continue
    assert [run.exit_code for run in wandb.runs] == [0, 1, 0]
    assert [run.num_finishes for run in wandb.runs] == [1, 1, 1]
    assert [run.options["group"] for run in wandb.runs] == ["12-00-00"] * 3
    sweeps = [{"seed": job, "sweep": {"folder": "12-00-00", "job": job}} for job in range(3)]
    assert [run.options["config"] for run in wandb.runs] == sweeps
    assert [[row["job"] for row in run.server["rows"]] for run in wandb.runs] == [[0], [1], [2]]
    assert len({run.id for run in wandb.runs}) == 3


def test_a_run_left_open_by_somebody_else_stays_theirs(wandb, start):
    theirs = wandb.init(mode="offline", id="theirs")
    with start() as telemetry:
        telemetry.log(StepReport(step=1, policy_version=0, metrics={}))
    assert (theirs.num_finishes, theirs.server["rows"]) == (0, [])
    assert len(wandb.runs) == 2


class Terminated(KeyboardInterrupt):
    exit_code = 143


@pytest.mark.parametrize(
    ("error", "exit_code"), [(KeyboardInterrupt(), 130), (Terminated(), 143), (ValueError("bad"), 1)]
)
def test_a_run_left_by_an_error_is_finished_as_failed(wandb, start, error, exit_code):
    with pytest.raises(type(error)), start():
        raise error
    assert wandb.runs[0].exit_code == exit_code


def test_the_exit_code_told_first_counts(wandb, start):
    with start() as telemetry:
        telemetry.finish(143)
    assert (wandb.runs[0].exit_code, wandb.runs[0].num_finishes) == (143, 1)


def test_steps_trained_again_after_a_resume_are_all_logged(wandb, start):
    first = start()
    for step in range(1, 9):
        first.log(StepReport(step=step, policy_version=step, metrics={}))
    wandb.live = None  # killed: nothing was finished
    with start(run_id=first.run_id) as second:
        for step in range(6, 11):
            second.log(StepReport(step=step, policy_version=step, metrics={}))
    assert second.run_id == first.run_id
    assert wandb.runs[1].options["resume"] == "allow"
    assert [row["step"] for row in wandb.runs[1].server["rows"]] == [*range(1, 9), *range(6, 11)]
    assert start().run_id != first.run_id


def test_an_unreachable_service_means_offline_under_the_same_id(wandb, start, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "made-up-123")
    wandb.is_reachable = False
    with start(mode="online") as telemetry:
        assert wandb.modes == ["online", "offline"]
        assert wandb.runs[0].id == telemetry.run_id
    warning = "warning: W&B can't be reached, the run goes on offline: TimeoutError: no answer\n"
    assert capsys.readouterr().err == warning


def test_logging_that_fails_is_one_warning_and_no_end(wandb, start, capsys, tmp_path):
    wandb.failing_logs = range(2, 5)
    with start() as telemetry:
        for step in range(1, 7):
            telemetry.log(StepReport(step=step, policy_version=step, metrics={}))
    assert capsys.readouterr().err == "warning: W&B failed, the run goes on: ConnectionError: the network is gone\n"
    assert [row["step"] for row in wandb.runs[0].server["rows"]] == [1, 5, 6]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6
    assert wandb.runs[0].exit_code == 0


def test_a_package_that_breaks_at_start_is_a_warning(wandb, start, monkeypatch, capsys):
    monkeypatch.setattr(wandb, "init", lambda **options: 1 // 0)
    with start() as telemetry:
        telemetry.log(StepReport(step=1, policy_version=0, metrics={}))
    assert capsys.readouterr().err.startswith("warning: W&B is off: ZeroDivisionError")


def test_a_machine_without_wandb_gets_a_note_and_its_metrics(start, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with start() as telemetry:
        telemetry.log(StepReport(step=1, policy_version=0, metrics={}))
    out, err = capsys.readouterr()
    assert (out.partition(" (")[0], err) == ("W&B is off", "")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "policy_version": 0}\n'


def test_disabled_never_imports_wandb(start, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with start(mode="disabled"):
        pass
    assert capsys.readouterr() == ("", "")


def test_the_summary_reaches_the_run_and_the_folder(wandb, start, tmp_path):
    data = {"accuracy_after": 0.875, "groups": {"dropped": {"data_ended": 1}}}
    with start() as telemetry:
        telemetry.summary(data)
    assert wandb.runs[0].summary == data
    assert json.loads((tmp_path / "summary.json").read_text()) == data


REAL_RUNS = """
import sys
from pathlib import Path
from asynctensorrlhf.telemetry.telemetry import Telemetry
from asynctensorrlhf.types import StepReport
for job in (0, 1):
    folder = Path(str(job))
    folder.mkdir()
    with Telemetry(
        folder=folder, config={"a": {"token": sys.argv[1]}}, num_steps=3, decode=lambda p, c: [], run_id=None,
        sweep=None, mode="auto", project="p", name=None, samples=0, print_every=1, health_window=2,
    ) as telemetry:
        for step in (1, 2, 3):
            telemetry.log(StepReport(step, step, {"reward/mean": float("nan")}))
        telemetry.summary({"groups": {"dropped": {}}, "stop_reason": "completed"})
        assert telemetry.warnings == type(telemetry.warnings)(), telemetry.warnings
"""


def test_the_real_package_works_without_key_network_or_stdin_and_keeps_secrets(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = 'exec "$0" -c "$1" made-up-123 <&-'
    arguments = ["sh", "-c", command, sys.executable, REAL_RUNS]
    run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, "")
    assert {line.partition(" ")[0] for line in run.stdout.splitlines()} == {"W&B:", "step"}
    for job in "01":
        assert len(list((tmp_path / job / "wandb").glob("offline-run-*"))) == 1
        assert len((tmp_path / job / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "wandb").exists()
    written = [path for job in "01" for path in (tmp_path / job).rglob("*") if path.is_file()]
    assert [path for path in written if b"made-up-123" in path.read_bytes()] == []
