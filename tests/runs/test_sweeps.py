"""Multiruns of real jobs: each in its own folder, none disturbed by another that fails."""

import json
import threading

import pytest

from asynctensorrlhf.cli import train_job
from asynctensorrlhf.composition.jobs import run_jobs
from tests.runs.running import SMALL, Run, assert_same_run, train
from tests.runs.test_failures import write_loss_option


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three jobs of which the second fails at its third update."""
    folder = tmp_path_factory.mktemp("sweep")
    option = write_loss_option(folder, fail_from=3)
    options = (*SMALL, *option[:2], "trainer.mode=sync", "trainer.max_skipped_steps=0", f"output_dir={folder / 'all'}")
    code = run_jobs(["-m", "loss=ppo,broken,grpo", *options], train_job)
    return code, folder / "all"


def test_one_failing_job_fails_the_sweep_and_no_other_job(sweep):
    code, folder = sweep
    assert code == 1
    jobs = json.loads((folder / "sweep.json").read_text())["jobs"]
    assert [job["exit_code"] for job in jobs] == [0, 1, 0]
    assert [job["summary"]["stop_reason"] for job in jobs] == ["completed", "error", "completed"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


def test_the_failing_jobs_own_log_holds_its_traceback(sweep):
    _, folder = sweep
    log = (folder / "1" / "train.log").read_text()
    assert "Traceback" in log
    assert "NonFiniteUpdate" in log
    assert "Traceback" not in (folder / "0" / "train.log").read_text()


@pytest.mark.parametrize(("number", "loss"), [(0, "ppo"), (2, "grpo")])
def test_a_job_of_a_sweep_equals_the_same_run_alone(sweep, tmp_path, number, loss):
    _, folder = sweep
    assert_same_run(Run(0, folder / str(number)), train(tmp_path / "run", "trainer.mode=sync", f"loss={loss}"))


def test_a_job_with_another_precision_follows_in_the_same_process(tmp_path):
    options = [*SMALL, "trainer.num_steps=1", f"output_dir={tmp_path / 'all'}"]
    assert run_jobs(["-m", "model.dtype=float32,bfloat16,float32", *options], train_job) == 0


def test_folder_names_are_plain_and_hold_everything(sweep):
    _, folder = sweep
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["0", "1", "2"]
    assert not (folder / "summary.json").exists()
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "final", "checkpoints"} <= {
        path.name for path in (folder / "0").iterdir()
    }
