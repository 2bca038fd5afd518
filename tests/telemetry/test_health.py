import math

import pytest

from asynctensorrlhf.telemetry.health import Health
from asynctensorrlhf.types import StepReport


def run(health, rows):
    """Warnings by step, from 1."""
    reports = (StepReport(step, step, metrics) for step, metrics in enumerate(rows, start=1))
    return {report.step: warnings for report in reports if (warnings := health.check(report))}


CONSTANT_REWARD = {"reward/zero_variance_fraction": 1.0, "train/has_signal": 0.0}


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (CONSTANT_REWARD, ["no group had any reward variance in the last 3 steps"]),
        ({"rollout/truncated_fraction": 0.96}, ["96%", "the last 3 steps were cut at rollout.max_new_tokens"]),
        ({"reward/unscored_fraction": 0.75}, ["75%", "got no score"]),
        ({"train/has_signal": 0.0, "reward/zero_variance_fraction": 0.5}, ["100%", "no signal"]),
        ({"ratio/mean": 4.0}, ["4.0 times away from 1", "buffer.max_staleness"]),
        ({"ratio/mean": 0.25}, ["4.0 times away from 1"]),
        ({"ratio/mean": 0.0}, ["times away from 1"]),
        (
            {"ratio/abs_log_ratio_max": 2.5, "staleness/max_versions": 0.0},
            ["ratios far from 1 with 0 staleness", "2.5 nats", "temperature", "dtype", "tokenization"],
        ),
        ({"mismatch/k3": 0.25}, ["engine mismatch", "0.25 nats", "rollout.temperature"]),
        ({"ratio/ess_token": 0.2}, ["80% of the batch", "effective sample size"]),
    ],
)
def test_trouble_is_told_once_when_the_window_is_full_of_it(trouble, words):
    told = run(Health(window=3), [trouble] * 10)
    assert list(told) == [3]
    (text,) = told[3]
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"reward/zero_variance_fraction": 0.99},
        {"rollout/truncated_fraction": 0.85},
        {"ratio/mean": 1.9},
        {"ratio/mean": math.nan},
        {"ratio/abs_log_ratio_max": 2.5, "staleness/max_versions": 1.0},
        {"ratio/abs_log_ratio_max": 2.5, "staleness/max_versions": 0.0, "train/num_updates": 2.0},
        {"mismatch/k3": 0.01},
        {"ratio/ess_token": 0.5},
        {"ratio/ess_token": math.nan},
        {"reward/unscored_fraction": 0.1, "train/has_signal": 1.0},
    ],
)
def test_a_run_that_can_learn_hears_nothing(metrics):
    health = Health(window=3)
    assert run(health, [metrics] * 10) == {}
    assert health.closing() == []


def test_one_step_with_variance_keeps_a_window_quiet():
    rows = [{"reward/zero_variance_fraction": share} for share in (1.0, 1.0, 0.9, 1.0, 1.0)]
    assert run(Health(window=3), rows) == {}


def test_a_value_that_swings_around_the_limit_is_told_once():
    rows = [{"rollout/truncated_fraction": share} for share in (0.95, 0.85, 0.95, 0.85, 0.95)]
    assert list(run(Health(window=1), rows)) == [1]


def test_trouble_that_comes_back_is_told_again():
    rows = [{"rollout/truncated_fraction": share} for share in (1.0, 1.0, 0.0, 0.0, 1.0, 1.0)]
    assert list(run(Health(window=2), rows)) == [2, 6]


def test_a_run_shorter_than_the_window_is_told_at_its_end():
    health = Health(window=20)
    assert run(health, [CONSTANT_REWARD] * 4) == {}
    (text,) = health.closing()
    assert "the last 4 steps" in text


def test_the_verdict_says_who_waited_over_the_whole_run():
    waiting, busy = Health(window=1), Health(window=1)
    run(waiting, [{"time/wait_for_batch_s": wait_s, "time/step_s": 1.0} for wait_s in (0.75, 0.25)])
    run(busy, [{"time/wait_for_batch_s": 0.01, "time/step_s": 1.0}])
    assert "waited 50% of its time for rollouts: generation is the bottleneck" in waiting.verdict()
    assert "training is the bottleneck" in busy.verdict()
    assert Health(window=1).verdict() is None


def test_what_is_held_does_not_grow_with_the_run():
    health = Health(window=3)
    run(health, [{"ratio/mean": 1.0, "rollout/truncated_fraction": 0.5}] * 100)
    assert max(len(watch.values) for watch in health._watches) == 3
