"""Losses and gradients that are not finite, and weights too coarse to move."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from asynctensorrlhf.policy.load import load_model
from asynctensorrlhf.trainer.update import NonFiniteUpdate
from asynctensorrlhf.types import BatchPlan, LossInputs, LossOutput, TrainBatch
from tests.policy.tiny import tiny_model
from tests.trainer.updates import LOSSES, fresh_bench, make_bench, stale_batch


def with_one_nan(batch: TrainBatch) -> TrainBatch:
    advantages = batch.advantages.clone()
    advantages[0, 0] = float("nan")
    return replace(batch, advantages=advantages)


class SteepLoss:
    """Finite, with a gradient that is not."""

    needs = frozenset[str]()
    sequences = "trained"
    acts_without_advantage = False

    def plan(self, inputs: LossInputs) -> BatchPlan:
        raise AssertionError("it needs no plan")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        distance = torch.where(inputs.loss_mask, inputs.policy_logprobs - inputs.policy_logprobs.detach(), 0.0)
        return LossOutput(distance.sum().sqrt())


@pytest.mark.parametrize("loss", ["ppo", "grpo", "m2po"])
def test_a_loss_that_is_not_finite_skips_the_update_and_is_counted(loss: str) -> None:
    model = tiny_model("llama")
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    bench = make_bench(model, LOSSES[loss], optimizer=optimizer)
    batch = stale_batch(model)
    bench.update(batch, step=1)
    weights, moment = bench.weights(), next(iter(optimizer.state.values()))["exp_avg"].clone()
    report = bench.update(with_one_nan(batch), step=2)

    assert torch.equal(bench.weights(), weights)
    assert torch.equal(next(iter(optimizer.state.values()))["exp_avg"], moment)
    assert report.num_skipped == 1
    assert report.metrics["train/num_skipped_updates"] == 1
    assert bench.scheduler.last_epoch == 2
    assert all(value == value for value in report.metrics.values())  # NaN is no number to log
    bench.update(batch, step=3)
    assert bench.weights().isfinite().all()
    assert not torch.equal(bench.weights(), weights)


def test_a_gradient_that_is_not_finite_skips_the_update() -> None:
    bench = make_bench(tiny_model("llama"), SteepLoss(), max_skipped_steps=0)
    weights = bench.weights()
    with pytest.raises(NonFiniteUpdate, match=r"step 7: the gradient norm is (nan|inf); 1 updates skipped"):
        bench.update(stale_batch(bench.model), step=7)
    assert torch.equal(bench.weights(), weights)


def test_the_run_stops_after_more_skipped_updates_than_allowed() -> None:
    bench = fresh_bench("ppo", max_skipped_steps=2)
    batch = with_one_nan(stale_batch(bench.model))
    assert [bench.update(batch, step=step).num_skipped for step in (1, 2)] == [1, 1]
    with pytest.raises(NonFiniteUpdate, match=r"step 3: the loss is nan; .* trainer\.max_skipped_steps=2"):
        bench.update(batch, step=3)


def test_counters_go_on_after_a_resume() -> None:
    first, second = fresh_bench("ppo", max_skipped_steps=1), fresh_bench("ppo", max_skipped_steps=1)
    batch = with_one_nan(stale_batch(first.model))
    first.update(batch, step=1)
    second.update.load_state_dict(first.update.state_dict())
    assert second.update.state_dict() == {
        "num_updates": 1,
        "num_skipped_updates": 1,
        "num_updates_without_signal": 0,
        "kl_scale": 1.0,
    }
    with pytest.raises(NonFiniteUpdate):
        second.update(batch, step=2)


def test_small_updates_move_the_weights_of_a_bf16_checkpoint(tmp_path: Path) -> None:
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    bench = make_bench(model, LOSSES["ppo"], optimizer=optimizer)
    for step in range(1, 21):
        bench.update(stale_batch(model, seed=step), step=step)

    blocks = [name for name in start if ".layers." in name]
    changed = torch.cat([(model.get_parameter(name) != start[name]).flatten() for name in blocks])
    assert changed.float().mean() > 0.9
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def test_weights_below_float32_are_refused() -> None:
    with pytest.raises(AssertionError, match="float32"):
        make_bench(tiny_model("llama").to(torch.bfloat16), LOSSES["ppo"])
