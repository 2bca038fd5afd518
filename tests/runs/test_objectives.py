"""Whole runs with a critic, a reference, an adaptive KL, a length penalty and a measured mismatch, sync and async."""

import math
import os

import pytest
import torch
from safetensors.torch import load_file

from asynctensorrlhf.policy import reference
from tests.runs.running import assert_same_run, train

CRITIC = ("loss=ppo", "advantage=gae", "advantage.kl_coef=0.1", "trainer.kl_target=0.001", "trainer.kl_horizon=100")
IN_LOSS = ("loss=grpo", "loss.kl_coef=0.1", "loss.entropy_coef=0.001")
MODES = pytest.mark.parametrize("mode", ["sync", "async"])


def head_of(folder):
    return load_file(folder / "value_head.safetensors")


@MODES
def test_a_critic_with_kl_in_the_reward_trains(tmp_path, mode):
    run = train(tmp_path / "run", *CRITIC, f"trainer.mode={mode}", "advantage.critic.num_warmup_steps=1")
    assert run.exit_code == 0
    first, *_, last = run.metrics
    assert {"value/loss", "value/explained_variance", "value/grad_norm", "kl/reward_k1", "kl/scale"} <= last.keys()
    assert first["kl/reward_k1"] == pytest.approx(0, abs=1e-6), "the reference is the model as the run began"
    assert last["kl/reward_k1"] != pytest.approx(0, abs=1e-6)
    assert last["kl/scale"] != 1.0
    assert head_of(run.folder / "final")["outer"].any(), "the head has learnt something"


def test_while_the_critic_warms_up_the_policy_stays_as_it_is(tmp_path):
    run = train(tmp_path / "run", *CRITIC, "trainer.mode=sync", "advantage.critic.num_warmup_steps=4")
    start = train(tmp_path / "start", "trainer.mode=sync", "optim.lr=1e-30")
    assert all(torch.equal(run.weights[name], start.weights[name]) for name in run.weights)
    assert head_of(run.folder / "final")["outer"].any()


@MODES
def test_kl_to_the_reference_and_entropy_in_the_loss(tmp_path, mode):
    run = train(tmp_path / "run", *IN_LOSS, f"trainer.mode={mode}")
    assert run.exit_code == 0
    first, *_, last = run.metrics
    assert first["kl/loss"] == pytest.approx(0, abs=1e-6)
    assert last["kl/loss"] > 0
    assert last["entropy/loss"] > 0


def test_a_reference_is_only_made_when_a_coefficient_asks_for_one(tmp_path, monkeypatch):
    made = []
    keep = reference.frozen_copy
    monkeypatch.setattr(
        "asynctensorrlhf.composition.training_side.frozen_copy", lambda model: made.append(1) or keep(model)
    )
    train(tmp_path / "without", "loss=grpo", "trainer.num_steps=1")
    assert made == []
    train(tmp_path / "with", *IN_LOSS, "trainer.num_steps=1")
    assert made == [1]


@pytest.mark.parametrize("objective", [CRITIC, IN_LOSS], ids=["critic", "kl"])
def test_a_run_goes_on_bit_for_bit_with_head_reference_and_controller(tmp_path, objective):
    options = (*objective, "trainer.mode=sync", "trainer.num_steps=4", "trainer.checkpoint_every=2")
    whole = train(tmp_path / "whole", *options)
    source = whole.folder / "checkpoints" / "step_2"
    resumed = train(tmp_path / "again", *options, f"resume={source}")
    assert resumed.exit_code == 0
    assert resumed.losses == whole.losses[2:]
    for name in ("kl/scale", "kl/reward_k1", "kl/loss", "value/loss"):
        assert [row.get(name) for row in resumed.metrics] == [row.get(name) for row in whole.metrics[2:]]
    assert all(torch.equal(resumed.weights[name], whole.weights[name]) for name in whole.weights)
    if objective is CRITIC:
        heads = [head_of(run.folder / "final") for run in (whole, resumed)]
        assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


def test_a_checkpoint_without_a_value_head_cannot_go_on_with_a_critic(tmp_path, capsys):
    plain = train(tmp_path / "plain", "loss=ppo", "trainer.mode=sync")
    code = train(tmp_path / "again", *CRITIC, f"resume={plain.folder / 'checkpoints' / 'step_4'}").exit_code
    assert code == 2
    assert "value_head.safetensors" in capsys.readouterr().err.replace(os.linesep, "")


def test_asynchronous_without_staleness_is_the_synchronous_run_also_with_a_critic(tmp_path):
    runs = [
        train(tmp_path / name, *CRITIC, *options)
        for name, options in (("sync", ("trainer.mode=sync",)), ("async", ("buffer.max_staleness=0",)))
    ]
    assert_same_run(*runs)


@MODES
def test_the_mismatch_of_the_engine_is_measured_apart_from_staleness(tmp_path, mode):
    run = train(tmp_path / "run", f"trainer.mode={mode}", "trainer.mismatch_every=1", "optim.lr=1e-2")
    measured = [row for row in run.metrics if "mismatch/k3" in row]
    assert measured
    assert all(row["mismatch/abs_log_ratio_max"] < 1e-4 for row in measured), "the engine reports what it samples with"
    stale = [row for row in measured if row["staleness/max_versions"] > 0]
    if mode == "sync":
        assert not stale
        assert all(row["drift/abs_log_ratio_max"] == 0 for row in measured)
    else:
        assert any(row["drift/abs_log_ratio_max"] > 1e-2 for row in stale)


def test_the_length_penalty_lowers_rewards_near_the_limit(tmp_path):
    options = ("trainer.mode=sync", "trainer.num_steps=1", "rollout.max_new_tokens=3", "loss=ppo")
    plain = train(tmp_path / "plain", *options)
    lowered = train(tmp_path / "lowered", *options, "trainer.overlong=penalty", "trainer.overlong_buffer=2")
    for before, after in zip(plain.samples, lowered.samples, strict=True):
        assert before["completion_ids"] == after["completion_ids"]
        expected = before["reward"] + min(0.0, (1 - len(before["completion_ids"])) / 2)
        assert after["reward"] == pytest.approx(expected)
    assert any(not math.isclose(a["reward"], b["reward"]) for a, b in zip(plain.samples, lowered.samples, strict=True))
