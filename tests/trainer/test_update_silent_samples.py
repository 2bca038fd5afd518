"""Samples without influence on the gradient: what they cost, and where they still count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests.policy.tiny import tiny_model
from tests.trainer.updates import LOSSES, fresh_bench, make_bench, stale_batch

ALL_LOSSES = pytest.mark.parametrize("loss", ["ppo", "grpo", "m2po"])


def without_signal(batch: Any) -> Any:
    return replace(batch, advantages=torch.zeros_like(batch.advantages))


@pytest.mark.parametrize("loss", ["ppo", "grpo"])
def test_silent_samples_are_not_forwarded_and_the_update_is_the_same(loss: str) -> None:
    batch = stale_batch(tiny_model("llama"))
    lean, full = fresh_bench(loss, diagnostics_every=10), fresh_bench(loss, diagnostics_every=1)
    lean_report, full_report = lean.update(batch, step=1), full.update(batch, step=1)

    assert lean.policy.passes == [(9, True)]  # 13 samples, of which 3 have advantage 0 and 1 is masked
    assert full.policy.passes == [(3, False), (9, True)]
    torch.testing.assert_close(lean.weights(), full.weights(), rtol=0, atol=1e-6)
    assert lean_report.metrics["train/num_silent_samples"] == full_report.metrics["train/num_silent_samples"] == 4
    for name in ("loss/total", "loss/clip_fraction_low", "loss/clip_fraction_high", "train/grad_norm"):
        assert lean_report.metrics[name] == pytest.approx(full_report.metrics[name], abs=1e-6)


def test_metrics_that_need_every_ratio_are_left_out_when_some_were_not_computed() -> None:
    bench = fresh_bench("ppo", diagnostics_every=2)
    lean = bench.update(stale_batch(bench.model), step=1).metrics
    full = bench.update(stale_batch(bench.model), step=2).metrics
    assert not any(name.startswith("ratio/") for name in lean)
    assert "train/entropy" not in lean
    assert {"ratio/mean", "ratio/abs_log_ratio_max", "train/entropy"} < set(full)


def test_a_mask_over_the_batch_reuses_the_graph_of_a_single_micro_batch() -> None:
    bench = fresh_bench("m2po", diagnostics_every=10)
    metrics = bench.update(stale_batch(bench.model), step=1).metrics
    assert bench.policy.passes == [(3, False), (9, True)]
    assert "ratio/mean" in metrics


def test_a_mask_over_several_micro_batches_is_made_before_the_first_gradient() -> None:
    bench = fresh_bench("m2po", micro_batch_tokens=30)
    bench.update(stale_batch(bench.model), step=1)
    gradients = [has_gradient for _, has_gradient in bench.policy.passes]
    assert gradients == sorted(gradients)
    assert sum(count for count, has_gradient in bench.policy.passes if has_gradient) == 9
    assert sum(count for count, has_gradient in bench.policy.passes if not has_gradient) == 9 + 3


@ALL_LOSSES
def test_batches_without_signal_leave_weights_and_moments_and_the_schedule_goes_on(loss: str) -> None:
    model = tiny_model("llama")
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    bench = make_bench(model, LOSSES[loss], optimizer=optimizer, diagnostics_every=3)
    batch = stale_batch(model)
    reports = [bench.update(batch, step=1)]
    weights = bench.weights()
    moments = [{name: value.clone() for name, value in state.items()} for state in optimizer.state.values()]
    reports += [bench.update(without_signal(batch), step=step) for step in (2, 3, 4)]

    assert torch.equal(bench.weights(), weights)
    for before, after in zip(moments, optimizer.state.values(), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert bench.scheduler.last_epoch == 4
    assert [report.has_signal for report in reports] == [True, False, False, False]
    assert [report.metrics["train/num_updates_without_signal"] for report in reports] == [0, 1, 2, 3]
    assert reports[3].metrics["train/grad_norm"] == 0
    assert reports[3].metrics["loss/total"] == 0


def test_a_first_batch_without_signal_needs_no_forward_and_warns_of_nothing() -> None:
    bench = fresh_bench("ppo", diagnostics_every=10)
    report = bench.update(without_signal(stale_batch(bench.model)), step=1)
    assert bench.policy.passes == []
    assert bench.scheduler.last_epoch == 1
    assert report.metrics["train/num_silent_samples"] == 13
    assert report.metrics["train/num_micro_batches"] == 0


def test_a_fully_masked_batch_has_loss_zero_and_changes_nothing() -> None:
    bench = fresh_bench("grpo")
    start, batch = bench.weights(), stale_batch(bench.model)
    report = bench.update(replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), step=1)
    assert report.metrics["loss/total"] == 0
    assert torch.equal(bench.weights(), start)


def test_rewards_are_reported_without_unscored_samples() -> None:
    bench = fresh_bench("ppo")
    rewards = torch.tensor([0.5, 0.25, float("nan"), 1.0, *[0.7] * 3, *[float("nan")] * 4, 0.0, 2.0])
    metrics = bench.update(replace(stale_batch(bench.model), rewards=rewards), step=1).metrics
    assert metrics["reward/mean"] == pytest.approx((0.5 + 0.25 + 1 + 2.1 + 2) / 8)
    assert metrics["reward/zero_variance_fraction"] == 0.5
