"""Runs that stop and go on: killed, interrupted, out of data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.runs.running import SMALL, Run, assert_same_run, is_conserved, rows, train
from tests.runs.test_failures import write_loss_option

SYNC = ("trainer.mode=sync", "trainer.num_steps=6", "trainer.checkpoint_every=2")


def start(folder, *overrides):
    """The same job in a process of its own, its output in a pipe."""
    command = [sys.executable, "-m", "asynctensorrlhf.cli", "train", *SMALL, f"output_dir={folder}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)


def signal_at_step(process, step, signum, num_signals=1):
    """Send the signal when the line of a step is printed; returns the exit code and all output."""
    # the test, not the job, must end when the line never comes
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    lines = []
    with process:
        for line in process.stdout:
            lines.append(line)
            if line.startswith(f"step {step}/"):
                for _ in range(num_signals):
                    process.send_signal(signum)
                break
        lines += process.stdout.readlines()
    watchdog.cancel()
    return process.returncode, "".join(lines)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole") / "run", *SYNC)


def test_a_killed_synchronous_run_goes_on_bit_for_bit(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    code, output = signal_at_step(start(folder, *SYNC, "logger.print_every=1"), 5, signal.SIGKILL)
    assert code == -signal.SIGKILL, output
    resumed = train(folder, *SYNC, "resume=auto")
    assert resumed.exit_code == 0
    assert_same_run(uninterrupted, resumed)
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["train/lr"] for row in resumed.metrics] == [row["train/lr"] for row in uninterrupted.metrics]
    whole, again = uninterrupted.summary, resumed.summary
    for key in ("groups", "num_steps", "completion_tokens", "max_staleness_seen"):
        assert again[key] == whole[key]


def test_resume_auto_starts_in_an_empty_folder_and_has_nothing_to_do_in_a_finished_one(uninterrupted, tmp_path):
    run = train(tmp_path / "run", *SYNC, "resume=auto")
    assert_same_run(uninterrupted, run)
    again = train(tmp_path / "run", *SYNC, "resume=auto")
    assert again.exit_code == 0
    assert_same_run(uninterrupted, again)


def test_a_checkpoint_goes_on_in_another_folder(uninterrupted, tmp_path):
    source = uninterrupted.folder / "checkpoints" / "step_4"
    run = train(tmp_path / "other", *SYNC, f"resume={source}")
    assert [row["step"] for row in run.metrics] == [5, 6]
    assert run.losses == uninterrupted.losses[4:]


def test_an_asynchronous_resume_draws_outstanding_prompts_first_and_loses_none(tmp_path):
    folder, options = tmp_path / "run", ("trainer.checkpoint_every=2", "rollout.num_workers=2")
    train(folder, *options, "trainer.num_steps=4")
    state = json.loads((folder / "checkpoints" / "step_4" / "state.json").read_text())
    outstanding = state["prompts"]["reissue"]
    run = train(folder, *options, "trainer.num_steps=8", "resume=auto")
    trained = list(dict.fromkeys(row["group_id"] for row in run.samples))
    assert trained == list(range(32))
    assert trained[16 : 16 + len(outstanding)] == outstanding
    assert is_conserved(run.summary)
    assert run.summary["groups"]["trained"] == 32
    assert max(row["staleness"] for row in run.samples) <= 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_a_checkpoint_a_summary_and_its_own_exit_code(tmp_path, signum, code):
    folder = tmp_path / "run"
    process = start(folder, "trainer.num_steps=100000", "logger.print_every=1", "trainer.checkpoint_every=null")
    exit_code, output = signal_at_step(process, 3, signum)
    assert exit_code == code, output
    run = Run(exit_code, folder)
    summary = run.summary
    assert summary["stop_reason"] == "interrupted"
    assert summary["num_steps"] >= 3
    assert is_conserved(summary)
    assert "Traceback" not in output
    num_steps = summary["num_steps"] + 2
    resumed = train(folder, f"trainer.num_steps={num_steps}", "resume=auto")
    assert resumed.exit_code == 0
    assert [row["step"] for row in resumed.metrics] == list(range(1, num_steps + 1))
    assert is_conserved(resumed.summary)


def test_a_second_signal_ends_at_once(tmp_path):
    process = start(tmp_path / "run", "trainer.num_steps=100000", "logger.print_every=1")
    exit_code, _ = signal_at_step(process, 2, signal.SIGINT, num_signals=2)
    assert exit_code == 130


def test_a_signal_while_the_trainer_waits_for_a_slow_engine_ends_the_run(tmp_path):
    options = ("engine=stub", "engine.mean_delay_s=0.2", "engine.script=[[7,8,9,10,11,2]]")
    process = start(tmp_path / "run", *options, "trainer.num_steps=100000", "logger.print_every=1")
    exit_code, output = signal_at_step(process, 1, signal.SIGTERM)
    assert exit_code == 143, output
    assert is_conserved(Run(143, tmp_path / "run").summary)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_checkpoint_gone_on_from_and_those_after_it_outlive_a_damaged_newer_one(tmp_path):
    folder, options = tmp_path / "run", ("trainer.checkpoint_every=1",)
    train(folder, *options, "trainer.num_steps=4", "trainer.keep_checkpoints=null")
    (folder / "checkpoints" / "step_4" / "tokenizer.json").write_text("{")
    run = train(folder, *options, "trainer.num_steps=3", "trainer.keep_checkpoints=1", "resume=auto")
    assert run.exit_code == 0
    names = {path.name for path in (folder / "checkpoints").iterdir()}
    assert names == {"step_1", "step_2", "step_3", "step_4.after_step_3"}


def test_an_attempt_that_is_given_up_does_not_come_back(tmp_path, capfd):
    folder, options = tmp_path / "run", ("trainer.checkpoint_every=1", "trainer.num_steps=5")
    train(folder, *options, "trainer.keep_checkpoints=null")
    named = f"resume={folder / 'checkpoints' / 'step_2'}"
    train(folder, *options, named, "trainer.keep_checkpoints=1", "trainer.num_steps=3")
    assert "step_5.after_step_2" in capfd.readouterr().out
    assert [path.name for path in (folder / "checkpoints").glob("step_?")] == ["step_3"]
    run = train(folder, *options, "resume=auto")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5]


def test_a_resumed_run_takes_its_learning_rate_from_its_own_config_and_the_number_of_updates(tmp_path):
    folder, options = tmp_path / "run", ("optim.schedule=linear", "optim.num_warmup_updates=2")
    train(folder, *options, "trainer.num_steps=4")
    changes = ("optim.lr=1e-3", "optim.weight_decay=0.5", "trainer.num_steps=6")
    run = train(folder, *options, *changes, "resume=auto")
    assert [row["train/lr"] for row in run.metrics[4:]] == pytest.approx([1e-3 * 2 / 4, 1e-3 * 1 / 4])
    optimizer = torch.load(folder / "checkpoints" / "step_6" / "optimizer.pt", weights_only=True)
    assert optimizer["param_groups"][0]["weight_decay"] == 0.5


def test_a_resumed_run_that_breaks_off_before_it_starts_keeps_its_counts(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted.folder, folder)
    option = write_loss_option(tmp_path, fail_from=1, name="UnbuildableLoss")
    run = train(folder, *SYNC, "resume=auto", *option)
    assert run.exit_code == 1
    for key in ("groups", "num_steps", "completion_tokens"):
        assert run.summary[key] == uninterrupted.summary[key]


def test_rows_past_the_checkpoint_are_moved_aside(tmp_path):
    folder = tmp_path / "run"
    options = ("trainer.checkpoint_every=2", "trainer.mode=sync")
    code, output = signal_at_step(
        start(folder, *options, "trainer.num_steps=100000", "logger.print_every=1"), 3, signal.SIGKILL
    )
    assert code == -signal.SIGKILL, output
    run = train(folder, *options, "trainer.num_steps=6", "resume=auto")
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    moved = sorted(folder.glob("*.after_step_*.jsonl"))
    restored = min(row["step"] for path in moved for row in rows(path)) - 1
    assert restored % 2 == 0
    assert all(row["step"] > restored for path in moved for row in rows(path))


def test_a_damaged_newest_checkpoint_is_passed_over(uninterrupted, tmp_path, capfd):
    folder = tmp_path / "run"
    train(folder, *SYNC)
    (folder / "checkpoints" / "step_6" / "model.safetensors").write_bytes(b"torn")
    run = train(folder, *SYNC, "resume=auto")
    assert "step_6" in capfd.readouterr().out
    assert_same_run(uninterrupted, run)


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_a_named_checkpoint_that_is_none_is_an_error(tmp_path, capfd, what):
    path = tmp_path / "step_3"
    if what == "damaged":
        path.mkdir()
        (path / "COMPLETE").write_text("3")
    run = train(tmp_path / "run", f"resume={path}")
    assert run.exit_code == 2
    assert "step_3" in capfd.readouterr().err


def test_other_data_is_refused_on_resume_and_nothing_of_the_run_is_touched(tmp_path, capfd):
    folder = tmp_path / "run"
    train(folder, "trainer.num_steps=1")
    before = contents(folder)
    run = train(folder, "trainer.num_steps=2", "resume=auto", "data.heldout_fraction=0.5")
    assert run.exit_code == 2
    assert "rows or order of the data" in capfd.readouterr().err
    after = contents(folder)
    # what Hydra writes by itself, before the job
    differing = {path for path in before | after if before.get(path) != after.get(path)}
    assert all(path.parts[0] in (".hydra", "train.log") for path in differing)


def test_a_used_folder_is_refused_and_left_as_it_is(uninterrupted, capfd):
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")}
    run = train(uninterrupted.folder, *SYNC)
    assert run.exit_code == 2
    assert "resume=auto" in capfd.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in uninterrupted.folder.rglob("*")}


def test_the_last_state_is_saved_once_and_only_the_newest_are_kept(tmp_path):
    run = train(tmp_path / "run", "trainer.num_steps=7", "trainer.checkpoint_every=2", "trainer.keep_checkpoints=2")
    names = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert names == ["step_6", "step_7"]


def test_two_processes_do_not_run_in_one_folder(tmp_path, capfd):
    folder = tmp_path / "run"
    with start(folder, "trainer.num_steps=100000", "logger.print_every=1") as process:
        next(line for line in process.stdout if line.startswith("step 1/"))
        run = train(folder, "resume=auto")
        process.kill()
        process.stdout.read()
    assert run.exit_code == 2
    assert "another process is running in it" in capfd.readouterr().err
    assert train(folder, "resume=auto").exit_code == 0
