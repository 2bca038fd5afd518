"""Law 3 and the textbook: an update is the gradient of the whole optimizer batch, however it is cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynctensorrlhf.losses.aggregation import count_tokens_and_sequences
from asynctensorrlhf.losses.diagnostics import derived
from asynctensorrlhf.types import BatchPlan, LossInputs, LossOutput, TrainBatch
from tests.policy.tiny import plain_logprobs, tiny_model
from tests.trainer.updates import LOSSES, fresh_bench, make_bench, stale_batch

ALL_LOSSES = pytest.mark.parametrize("loss", ["ppo", "grpo", "m2po"])
NOT_OF_THE_BATCH = {"train/num_micro_batches"}


def textbook_loss(loss: str, logprobs: Tensor, batch: TrainBatch) -> LossOutput:
    num_tokens, num_sequences = count_tokens_and_sequences(batch.loss_mask, "trained")
    return LOSSES[loss](
        LossInputs(
            policy_logprobs=logprobs,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            global_num_tokens=num_tokens,
            global_num_sequences=num_sequences,
        )
    )


@ALL_LOSSES
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_update_is_the_gradient_of_the_loss_of_the_whole_batch(family: str, loss: str) -> None:
    model = tiny_model(family)
    batch = stale_batch(model)
    output = textbook_loss(loss, plain_logprobs(model, batch), batch)
    output.loss.backward()
    expected = torch.cat([(weight - weight.grad).detach().flatten() for weight in model.parameters()])

    bench = fresh_bench(loss, family)
    report = bench.update(batch, step=1)

    torch.testing.assert_close(bench.weights(), expected, rtol=0, atol=2e-5)
    assert (bench.weights() - expected).norm() < 1e-4 * report.metrics["train/grad_norm"]
    assert report.metrics["loss/total"] == pytest.approx(output.loss.item(), abs=1e-6)
    for name, value in derived({name: value.item() for name, value in output.metrics.items()}).items():
        assert report.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert report.metrics["ratio/abs_log_ratio_max"] == pytest.approx(
        output.maxima["ratio/abs_log_ratio_max"].item(), rel=1e-4
    )


@ALL_LOSSES
@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(("budget", "share_prompt"), [(50, True), (30, True), (16, True), (40, False), (1, False)])
def test_the_cut_into_micro_batches_changes_nothing(loss: str, epochs: int, budget: int, share_prompt: bool) -> None:
    settings: dict[str, Any] = {"epochs_per_step": epochs, "minibatches_per_step": epochs}
    batch = stale_batch(tiny_model("llama"))
    whole = fresh_bench(loss, **settings)
    cut = fresh_bench(loss, micro_batch_tokens=budget, share_prompt=share_prompt, **settings)
    metrics, cut_metrics = whole.update(batch, step=1).metrics, cut.update(batch, step=1).metrics

    assert cut_metrics["train/num_micro_batches"] > metrics["train/num_micro_batches"]
    # a second update of this size magnifies what float32 left of the first
    torch.testing.assert_close(cut.weights(), whole.weights(), rtol=0, atol=2e-5 if epochs == 1 else 2e-4)
    assert cut_metrics.keys() == metrics.keys()
    for name in metrics.keys() - NOT_OF_THE_BATCH:
        assert cut_metrics[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-5), name


@ALL_LOSSES
def test_two_minibatches_are_two_updates_each_with_its_own_denominators(loss: str) -> None:
    batch = stale_batch(tiny_model("llama"))
    together, apart = fresh_bench(loss, minibatches_per_step=2), fresh_bench(loss)
    together.update(batch, step=1)
    for start, stop, first_prompt in ((0, 7, 0), (7, 13, 2)):
        rows = {name: value[start:stop] for name, value in vars(batch).items() if len(value) == batch.num_samples}
        prompts = {name: getattr(batch, name)[first_prompt:][:2] for name in ("prompt_ids", "prompt_lengths")}
        half = replace(batch, **{**rows, **prompts, "prompt_index": batch.prompt_index[start:stop] - first_prompt})
        apart.update(half, step=1)
    torch.testing.assert_close(together.weights(), apart.weights(), rtol=0, atol=2e-5)


@ALL_LOSSES
def test_what_padding_and_masked_tokens_hold_changes_no_bit(loss: str) -> None:
    batch = stale_batch(tiny_model("llama"))
    junk = replace(
        batch,
        behaviour_logprobs=batch.behaviour_logprobs.where(batch.loss_mask, float("inf")),
        advantages=batch.advantages.where(batch.loss_mask, -float("inf")),
        completion_ids=batch.completion_ids.where(batch.completion_mask, -7),
    )
    clean_bench, junk_bench = fresh_bench(loss, micro_batch_tokens=40), fresh_bench(loss, micro_batch_tokens=40)
    assert clean_bench.update(batch, step=1).metrics == junk_bench.update(junk, step=1).metrics
    assert torch.equal(clean_bench.weights(), junk_bench.weights())
    assert junk_bench.weights().isfinite().all()


@ALL_LOSSES
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_untouched_weights_have_ratio_one(family: str, temperature: float, loss: str) -> None:
    model = tiny_model(family)
    batch = stale_batch(model)
    with torch.no_grad():
        batch = replace(batch, behaviour_logprobs=plain_logprobs(model, batch, temperature=temperature))
    metrics = make_bench(model.train(), LOSSES[loss], temperature=temperature).update(batch, step=1).metrics
    assert metrics["ratio/abs_log_ratio_max"] < 1e-4
    assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio/approx_kl_k3"] == pytest.approx(0, abs=1e-4)
    assert metrics["loss/clip_fraction_low"] == metrics["loss/clip_fraction_high"] == 0


def test_the_global_norm_is_clipped() -> None:
    batch = stale_batch(tiny_model("llama"))
    free, clipped = fresh_bench("ppo", micro_batch_tokens=30), fresh_bench("ppo", max_grad_norm=0.01)
    start = free.weights()
    free_norm = free.update(batch, step=1).metrics["train/grad_norm"]
    assert clipped.update(batch, step=1).metrics["train/grad_norm"] == pytest.approx(free_norm, rel=1e-4)
    torch.testing.assert_close(
        clipped.weights() - start, (free.weights() - start) * (0.01 / free_norm), rtol=0, atol=1e-6
    )


class ProximalLoss:
    """Reads `proximal_logprobs` and remembers them with what the policy said at the same time."""

    needs = frozenset({"proximal_logprobs"})
    sequences = "trained"
    acts_without_advantage = False

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def plan(self, inputs: LossInputs) -> BatchPlan:
        raise AssertionError("it needs no plan")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        assert inputs.proximal_logprobs is not None
        mask = inputs.loss_mask
        self.seen.append((inputs.policy_logprobs.detach()[mask], inputs.proximal_logprobs[mask]))
        gain = torch.where(mask, inputs.policy_logprobs * inputs.advantages, 0.0)
        return LossOutput(-gain.sum() / inputs.global_num_tokens)


def test_proximal_logprobs_are_those_of_the_start_of_the_step() -> None:
    loss = ProximalLoss()
    bench = make_bench(tiny_model("llama"), loss, epochs_per_step=2, diagnostics_every=10)
    bench.update(stale_batch(bench.model), step=1)
    (policy, proximal), (later_policy, later_proximal) = loss.seen
    torch.testing.assert_close(policy, proximal, rtol=0, atol=1e-5)
    assert torch.equal(later_proximal, proximal)
    assert (later_policy - later_proximal).abs().max() > 1e-3
    assert [has_gradient for _, has_gradient in bench.policy.passes] == [False, True, True]
