"""Injected errors and exhausted inputs: bounded time, the right exit code, the cause on stderr, counts that add up."""

import json
import threading

import pytest
from safetensors.torch import load_file

from tests.runs.running import is_conserved, train


def write_rows(path, num_rows):
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(num_rows)))
    return ("data=jsonl", f"data.path={path}", "data.num_epochs=1")


def no_rollout_thread_is_left():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_engine_that_fails_ends_the_run_with_its_message(tmp_path, capfd, mode):
    run = train(
        tmp_path / "run",
        "engine=stub",
        "engine.fail_at_step=9",
        "engine.fail_message=the engine broke",
        f"trainer.mode={mode}",
        "trainer.num_steps=1000",
    )
    assert run.exit_code == 1
    error = capfd.readouterr().err
    assert "RuntimeError: the engine broke" in error
    assert "rollout/worker.py" in error
    summary = run.summary
    assert summary["stop_reason"] == "error"
    assert is_conserved(summary)
    assert "the engine broke" in (run.folder / "train.log").read_text()
    assert no_rollout_thread_is_left()


def test_what_was_trained_before_a_worker_died_is_kept(tmp_path):
    options = ("engine=stub", "engine.fail_at_step=40", "trainer.num_steps=1000", "trainer.checkpoint_every=null")
    run = train(tmp_path / "run", *options)
    num_steps = run.summary["num_steps"]
    assert num_steps > 0
    assert (run.folder / "checkpoints" / f"step_{num_steps}" / "COMPLETE").is_file()
    again = train(tmp_path / "run", "engine=stub", f"trainer.num_steps={num_steps + 2}", "resume=auto")
    assert again.exit_code == 0
    assert is_conserved(again.summary)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("partial", [True, False])
def test_data_that_ends_ends_the_run_as_configured(tmp_path, mode, partial):
    run = train(
        tmp_path / "run",
        *write_rows(tmp_path / "a.jsonl", 6),
        f"trainer.mode={mode}",
        f"trainer.partial_batch={partial}",
    )
    summary = run.summary
    assert run.exit_code == 0
    assert summary["stop_reason"] == "data_ended"
    assert summary["groups"]["drawn"] == 6
    assert summary["groups"]["trained"] == (6 if partial else 4)
    assert summary["groups"]["dropped"] == ({} if partial else {"data_ended": 2})
    assert summary["num_steps"] == (2 if partial else 1)
    assert is_conserved(summary)
    assert (run.folder / "final" / "model.safetensors").is_file()
    assert (run.folder / "checkpoints" / f"step_{summary['num_steps']}").is_dir()


def test_every_prompt_is_trained_once_an_epoch(tmp_path):
    run = train(tmp_path / "run", *write_rows(tmp_path / "a.jsonl", 8), "data.num_epochs=2", "trainer.num_steps=100")
    prompts = [row["prompt"] for row in run.samples if row["sample_index"] == 0]
    assert sorted(prompts[:8]) == sorted(prompts[8:]) == sorted(f"{i}+1=" for i in range(8))
    assert prompts[:8] != prompts[8:]


def test_fewer_rows_than_a_step_and_no_partial_batch_is_an_error_that_says_why(tmp_path, capfd):
    run = train(tmp_path / "run", *write_rows(tmp_path / "a.jsonl", 3))
    assert run.exit_code != 0
    error = capfd.readouterr().err
    assert "trainer.partial_batch" in error
    assert "3" in error


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ("data.path", "no")),
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n', ("a.jsonl", "line 2")),
        ('{"question": "1+1=", "Answer": "2"}\n', ("prompt", "question")),
    ],
)
def test_bad_data_is_one_line_before_any_model_is_loaded(tmp_path, capfd, text, fragments):
    (tmp_path / "a.jsonl").write_text(text)
    run = train(tmp_path / "run", "data=jsonl", f"data.path={tmp_path / 'a.jsonl'}")
    captured = capfd.readouterr()
    assert run.exit_code == 2
    assert len(captured.err.strip().split("\n")) == 1
    assert all(fragment in captured.err for fragment in fragments), captured.err
    assert "Loading weights" not in captured.err + captured.out


def write_loss_option(folder, fail_from, name="BrokenLoss"):
    """A loss of the user's own, in the user's own config folder."""
    (folder / "loss").mkdir()
    option = {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "fail_from": fail_from}
    target = {"_target_": f"tests.runs.broken_loss.{name}"}
    (folder / "loss" / "broken.yaml").write_text(json.dumps(target | option))
    return ("--config-dir", str(folder), "loss=broken")


def test_a_loss_that_stays_non_finite_stops_the_run_with_good_weights(tmp_path, capfd):
    options = ("trainer.num_steps=50", "trainer.max_skipped_steps=2", "trainer.checkpoint_every=1")
    run = train(tmp_path / "run", *write_loss_option(tmp_path, fail_from=3), *options)
    assert run.exit_code == 1
    error = capfd.readouterr().err
    assert "the loss is nan" in error
    assert "trainer.max_skipped_steps=2" in error
    summary = run.summary
    assert summary["groups"]["dropped"] == {"non_finite_update": 8}
    assert is_conserved(summary)
    newest = max((run.folder / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
    weights = load_file(newest / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_loss_that_is_not_finite_once_is_skipped_and_counted(tmp_path):
    run = train(tmp_path / "run", *write_loss_option(tmp_path, fail_from=None))
    assert run.exit_code == 0
    assert run.metrics[-1]["train/num_skipped_updates"] == 1
    # what was discarded was not trained, and is not listed as if it had been
    assert [row["step"] for row in run.samples] == [1] * 16 + [3] * 16 + [4] * 16
    assert run.summary["completion_tokens"] == sum(len(row["completion_ids"]) for row in run.samples)
    assert run.summary["groups"]["dropped"] == {"non_finite_update": 4}


@pytest.mark.parametrize(("minibatches", "fail_from", "saved"), [(1, 3, ["step_2"]), (2, 5, ["step_2"]), (2, 6, [])])
def test_an_update_that_raises_keeps_the_steps_before_it_unless_the_weights_are_torn(
    tmp_path, minibatches, fail_from, saved
):
    option = write_loss_option(tmp_path, fail_from=fail_from, name="RaisingLoss")
    options = (f"trainer.minibatches_per_step={minibatches}", "trainer.checkpoint_every=null", "trainer.mode=sync")
    # groups large enough for every update to have something to learn
    run = train(tmp_path / "run", *option, *options, "rollout.group_size=16")
    assert run.exit_code == 1
    assert run.summary["num_steps"] == 2
    assert is_conserved(run.summary)
    assert [path.name for path in run.folder.glob("checkpoints/step_*")] == saved


def test_a_run_that_cannot_learn_says_so(tmp_path, capfd):
    options = ("engine=stub", "engine.script=[[7,2]]", "trainer.num_steps=6", "logger.health_window=3")
    train(tmp_path / "run", *options)
    assert "no group had any reward variance" in capfd.readouterr().err


def test_an_evaluation_that_fails_after_training_is_no_completed_run(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("no evaluation")

    monkeypatch.setattr("asynctensorrlhf.train.evaluate_after", fail)
    run = train(tmp_path / "run")
    assert run.exit_code == 1
    assert run.summary["stop_reason"] == "error"
    assert run.summary["num_steps"] == 4
