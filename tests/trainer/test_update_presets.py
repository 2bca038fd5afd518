"""Law 3 for every preset, the critic, the reference and each stage: the cut of the batch changes no update."""

from __future__ import annotations

import pytest
import torch

from tests.policy.tiny import tiny_model
from tests.trainer.gloo_update import OBJECTIVES, bench_of, cut_batch

EACH = pytest.mark.parametrize("objective", OBJECTIVES)


@EACH
@pytest.mark.parametrize(("budget", "share_prompt"), [(30, True), (1, False)])
def test_the_cut_into_micro_batches_changes_nothing(objective: str, budget: int, share_prompt: bool) -> None:
    batch = cut_batch()
    whole = bench_of(objective)
    cut = bench_of(objective, micro_batch_tokens=budget, share_prompt=share_prompt)
    start = whole.weights()
    for step in (1, 2):
        metrics = whole.update(batch, step=step, policy_version=3).metrics
        cut_metrics = cut.update(batch, step=step, policy_version=3).metrics
        assert cut_metrics.keys() == metrics.keys()
        for name in metrics.keys() - {"train/num_micro_batches"}:
            assert cut_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name
    torch.testing.assert_close(cut.weights(), whole.weights(), rtol=0, atol=1e-6)
    assert (whole.weights() - start).abs().max() > 1e-4, "an update that does nothing is always the same"


@EACH
def test_a_nan_advantage_or_value_is_skipped_and_leaves_the_weights(objective: str) -> None:
    bench, batch = bench_of(objective), cut_batch()
    start = bench.weights()
    batch.advantages[0, :] = float("nan")
    report = bench.update(batch, step=1, policy_version=3)
    assert report.num_skipped >= 1
    assert bench.weights().isfinite().all()
    assert report.num_skipped < report.num_updates or torch.equal(bench.weights(), start)


def test_the_model_that_is_cut_is_the_one_of_the_other_tests() -> None:
    assert torch.equal(bench_of("ppo").weights(), bench_of("ppo").weights())
    assert tiny_model("llama").config.hidden_size == bench_of("gae").policy.value_head.inner.shape[0]
