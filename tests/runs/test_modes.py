"""Synchronous and asynchronous runs of the small default job."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs.running import assert_same_run, is_conserved, train


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sync") / "run", "trainer.mode=sync")


@pytest.mark.parametrize("num_workers", [1, 4])
def test_asynchronous_without_staleness_is_the_synchronous_run_bit_for_bit(synchronous, tmp_path, num_workers):
    run = train(tmp_path / "run", "buffer.max_staleness=0", f"rollout.num_workers={num_workers}")
    assert run.exit_code == 0
    assert_same_run(synchronous, run)


def test_a_synchronous_run_repeats_itself_from_another_folder_with_other_logging(synchronous, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(
        tmp_path / "run", "trainer.mode=sync", "logger.print_every=1", "trainer.eval_draws=8", "trainer.eval_every=2"
    )
    assert_same_run(synchronous, run)


def test_another_seed_is_another_run(synchronous, tmp_path):
    run = train(tmp_path / "run", "trainer.mode=sync", "seed=1")
    assert run.samples != synchronous.samples


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("buffer", ["versioned", "group"])
def test_no_trained_sample_is_older_than_the_bound(tmp_path, max_staleness, buffer):
    run = train(
        tmp_path / "run",
        "engine=stub",
        "engine.straggler_fraction=0.2",
        "engine.mean_delay_s=0.0005",
        "rollout.num_workers=4",
        "trainer.num_steps=12",
        f"buffer={buffer}",
        "buffer.filter_zero_variance=false" if buffer == "group" else "seed=0",
        f"buffer.max_staleness={max_staleness}",
    )
    assert run.exit_code == 0
    assert max(row["staleness"] for row in run.samples) <= max_staleness
    assert all(row["staleness"] == row["trained_version"] - row["min_policy_version"] for row in run.samples)
    assert run.summary["max_staleness_seen"] <= max_staleness
    assert len(run.samples) == 12 * 16
    assert is_conserved(run.summary)


def test_evicted_groups_are_counted_and_the_bound_holds_without_pacing(tmp_path):
    run = train(
        tmp_path / "run",
        "engine=stub",
        "engine.straggler_fraction=0.3",
        "rollout.num_workers=2",
        "rollout.max_concurrent=64",
        "buffer.staleness_policy=evict",
        "buffer.max_staleness=1",
        "trainer.num_steps=12",
    )
    assert run.exit_code == 0
    assert max(row["staleness"] for row in run.samples) <= 1
    assert is_conserved(run.summary)


def test_groups_without_variance_are_refilled_one_for_one(tmp_path):
    run = train(tmp_path / "run", "buffer=group", "trainer.num_steps=3")
    rewards = [row["reward"] for row in run.samples]
    groups = [rewards[start : start + 4] for start in range(0, len(rewards), 4)]
    assert len(groups) == 12
    assert all(len(set(group)) > 1 for group in groups)
    assert run.summary["groups"]["dropped"]["zero_variance"] > 0
    assert is_conserved(run.summary)


@pytest.mark.parametrize("loss", ["ppo", "m2po", "grpo"])
def test_every_loss_trains_with_epochs_minibatches_and_small_micro_batches(tmp_path, loss):
    run = train(
        tmp_path / "run",
        f"loss={loss}",
        "trainer.epochs_per_step=2",
        "trainer.minibatches_per_step=2",
        "trainer.micro_batch_tokens=60",
    )
    assert run.exit_code == 0
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert run.metrics[-1]["policy_version"] == 3


def test_untouched_weights_have_ratio_one(tmp_path):
    # a learning rate this small moves no float32 weight, so every step is on-policy whatever its staleness
    run = train(tmp_path / "run", "optim.lr=1e-30", "rollout.temperature=1.7", "trainer.diagnostics_every=1")
    for row in run.metrics:
        assert row["ratio/mean"] == pytest.approx(1, abs=1e-4)
        assert row["ratio/abs_log_ratio_max"] < 1e-4
        assert row["loss/clip_fraction_low"] == row["loss/clip_fraction_high"] == 0


def test_the_exported_model_loads_with_transformers_alone(synchronous):
    model = AutoModelForCausalLM.from_pretrained(synchronous.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(synchronous.folder / "final")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tokenizer("1+2=")["input_ids"] == [22, 16, 23, 34]


def test_held_out_accuracy_is_that_of_the_first_and_of_the_last_weights(tmp_path):
    run = train(tmp_path / "run", "trainer.eval_draws=64", "optim.lr=1e-30")
    summary = run.summary
    assert summary["accuracy_before"] == summary["accuracy_after"]
    assert summary["greedy_before"] == summary["greedy_after"]
    assert 0.2 < summary["accuracy_before"] < summary["greedy_before"]


def test_bfloat16_compute_keeps_float32_weights(tmp_path):
    run = train(tmp_path / "run", "model.dtype=bfloat16", "trainer.diagnostics_every=1", "trainer.num_steps=2")
    assert run.exit_code == 0
    assert {tensor.dtype.is_floating_point and str(tensor.dtype) for tensor in run.weights.values()} == {
        "torch.float32"
    }
    assert run.metrics[0]["ratio/mean"] == pytest.approx(1, abs=1e-2)
