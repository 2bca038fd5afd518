"""What holds of every loss: masked positions are without influence, and the cut of the batch does not matter."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.losses.aggregation import AGGREGATIONS, count_tokens_and_sequences
from asynctensorrlhf.losses.grpo import GRPO, compute_grpo_loss
from asynctensorrlhf.losses.m2po import M2PO, compute_m2po_loss
from asynctensorrlhf.losses.ppo import PPO, compute_ppo_loss
from asynctensorrlhf.losses.surrogate import log_ratio

ROOT = Path(__file__).parents[2]
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def scale_of(mode):
    return 8.0 if mode == "seq_mean_token_sum_norm" else None


LOSSES = {
    **{
        f"ppo-{mode}-{sequences}": PPO(
            **CLIP, dual_clip=3.0, aggregation=mode, sequences=sequences, loss_scale=scale_of(mode)
        )
        for mode in AGGREGATIONS
        for sequences in ("trained", "all")
    },
    "grpo": GRPO(**CLIP, aggregation="seq_mean_token_mean", sequences="trained", loss_scale=None),
    "m2po": M2PO(**CLIP, ratio_sq_threshold=2.25),
}
TENSORS = ("policy_logprobs", "behaviour_logprobs", "advantages", "loss_mask")
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def annotated(loss, inputs):
    """Inputs with what a trainer adds of the whole batch: denominators, mask, kept count."""
    num_tokens, num_sequences = count_tokens_and_sequences(inputs.loss_mask, loss.sequences)
    delta = log_ratio(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.loss_mask)
    keep = loss.keep_mask(delta, inputs.advantages, inputs.loss_mask)
    return replace(
        inputs,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
        keep_mask=keep,
        global_num_kept_tokens=keep.sum(),
    )


def rows(inputs, index):
    changes = {name: getattr(inputs, name)[index] for name in (*TENSORS, "keep_mask")}
    return replace(inputs, **changes)


def run(loss, inputs):
    """The output and the gradient of the policy's log-probs, from a fresh leaf."""
    leaf = inputs.policy_logprobs.detach().clone().requires_grad_()
    output = loss(replace(inputs, policy_logprobs=leaf))
    output.loss.backward()
    return output, leaf.grad


@each_loss
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30, -1e30, 1000.0])
@pytest.mark.parametrize("name", ["policy_logprobs", "behaviour_logprobs", "advantages"])
def test_masked_positions_change_no_bit_of_loss_gradient_or_metric(make_inputs, loss, name, poison):
    inputs = make_inputs(dtype=torch.float32)
    poisoned = torch.where(inputs.loss_mask, getattr(inputs, name).detach(), poison)
    clean_output, clean_gradient = run(loss, annotated(loss, inputs))
    output, gradient = run(loss, annotated(loss, replace(inputs, **{name: poisoned})))
    assert torch.equal(output.loss, clean_output.loss)
    assert torch.equal(gradient, clean_gradient)
    assert output.metrics == clean_output.metrics
    assert output.maxima == clean_output.maxima


@each_loss
def test_only_a_loss_that_needs_a_keep_mask_drops_trained_tokens_and_none_keeps_others(make_inputs, loss):
    inputs = annotated(loss, make_inputs(spread=1.0))
    assert not (inputs.keep_mask & ~inputs.loss_mask).any()
    assert torch.equal(inputs.keep_mask, inputs.loss_mask) == ("keep_mask" not in loss.needs)


@each_loss
def test_no_intermediate_gradient_is_nan_behind_the_mask(make_inputs, loss):
    inputs = make_inputs()
    poisoned = {name: getattr(inputs, name).detach() for name in TENSORS[:3]}
    poisoned = {name: torch.where(inputs.loss_mask, value, math.nan) for name, value in poisoned.items()}
    with torch.autograd.set_detect_anomaly(True):
        run(loss, annotated(loss, replace(inputs, **poisoned)))


@each_loss
@given(seed=st.integers(0, 2**16), columns=st.integers(0, 5), empty_rows=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_padding_columns_and_rows_change_nothing(make_inputs, loss, seed, columns, empty_rows):
    inputs = make_inputs(seed=seed)
    if loss.sequences == "all":
        empty_rows = 0
    padded = {}
    for name in TENSORS:
        value = getattr(inputs, name).detach()
        padding = False if name == "loss_mask" else math.nan
        padded[name] = torch.nn.functional.pad(value, (0, columns, 0, empty_rows), value=padding)
    output, gradient = run(loss, annotated(loss, inputs))
    padded_output, padded_gradient = run(loss, annotated(loss, replace(inputs, **padded)))
    torch.testing.assert_close(padded_output.loss, output.loss)
    torch.testing.assert_close(dict(padded_output.metrics), dict(output.metrics))
    torch.testing.assert_close(padded_gradient[: gradient.shape[0], : gradient.shape[1]], gradient)


@each_loss
@given(seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=10, deadline=None)
def test_micro_batches_of_any_cut_add_up_to_the_whole(make_inputs, loss, seed, data):
    inputs = annotated(loss, make_inputs(num_samples=7, seed=seed, spread=1.0))
    home = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7)))
    output, gradient = run(loss, inputs)
    total = dict.fromkeys((*output.metrics, "loss"), torch.zeros((), dtype=torch.float64))
    largest = torch.zeros((), dtype=torch.float64)
    for micro_batch in range(4):  # some are empty
        part, part_gradient = run(loss, rows(inputs, home == micro_batch))
        torch.testing.assert_close(part_gradient, gradient[home == micro_batch])
        total = {name: value + {**part.metrics, "loss": part.loss}[name] for name, value in total.items()}
        largest = torch.maximum(largest, part.maxima["ratio/abs_log_ratio_max"])
    expected = {**output.metrics, "loss": output.loss.detach()}
    torch.testing.assert_close({name: value.detach() for name, value in total.items()}, expected)
    assert largest == output.maxima["ratio/abs_log_ratio_max"]


@each_loss
def test_samples_with_advantage_zero_can_be_left_out(make_inputs, loss):
    inputs = make_inputs()
    advantages = inputs.advantages.clone()
    advantages[::2] = 0.0
    whole = annotated(loss, replace(inputs, advantages=advantages))
    output, gradient = run(loss, whole)
    heard, heard_gradient = run(loss, rows(whole, slice(1, None, 2)))
    torch.testing.assert_close(heard.loss, output.loss)
    torch.testing.assert_close(heard_gradient, gradient[1::2])
    assert not gradient[::2].any()
    exact = [name for name in output.metrics if name.startswith("loss/")]
    assert all(torch.equal(heard.metrics[name], output.metrics[name]) for name in exact)


@each_loss
def test_a_fully_masked_batch_has_loss_zero_and_finite_zero_gradients(make_inputs, loss):
    inputs = make_inputs()
    empty = annotated(loss, replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask)))
    output, gradient = run(loss, empty)
    assert output.loss.item() == 0.0
    assert not gradient.any()
    assert all(math.isfinite(value) for value in output.metrics.values())


@each_loss
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("difference", [200.0, -200.0, 1000.0, -1000.0])
def test_extreme_live_log_ratios_give_a_finite_loss_and_gradient(make_inputs, loss, difference, advantage):
    inputs = make_inputs(dtype=torch.float32)
    policy = inputs.behaviour_logprobs + difference
    advantages = torch.full_like(policy, advantage)
    output, gradient = run(loss, annotated(loss, replace(inputs, policy_logprobs=policy, advantages=advantages)))
    assert output.loss.isfinite()
    assert not gradient.any()
    assert all(value.isfinite() for value in output.metrics.values())


@each_loss
@pytest.mark.parametrize("name", ["policy_logprobs", "behaviour_logprobs", "advantages"])
def test_a_live_nan_reaches_the_loss(make_inputs, loss, name):
    inputs = make_inputs()
    value = getattr(inputs, name).detach().clone()
    value[2, 1] = math.nan
    assert loss(annotated(loss, replace(inputs, **{name: value}))).loss.isnan()


@each_loss
def test_a_step_against_the_gradient_makes_good_tokens_likelier_and_bad_ones_less(make_inputs, loss):
    inputs = make_inputs(spread=0.01)
    _, gradient = run(loss, annotated(loss, inputs))
    assert torch.equal(gradient[inputs.loss_mask].sign(), -inputs.advantages[inputs.loss_mask].sign())


@each_loss
def test_the_gradient_is_the_derivative_of_the_loss(make_inputs, loss):
    inputs = annotated(loss, make_inputs(seed=3))
    evaluate = lambda policy: loss(replace(inputs, policy_logprobs=policy)).loss  # noqa: E731
    assert torch.autograd.gradcheck(evaluate, inputs.policy_logprobs.detach().clone().requires_grad_())


@each_loss
def test_it_never_asks_the_device_for_a_value(make_inputs, loss):
    inputs = make_inputs()
    on_meta = {name: getattr(inputs, name).detach().to("meta") for name in TENSORS}  # whose tensors have no values
    output = loss(annotated(loss, replace(inputs, **on_meta)))
    assert output.loss.is_meta
    assert all(value.is_meta for value in output.metrics.values())


COMPILE = """
import torch
from asynctensorrlhf.losses.m2po import compute_m2po_loss
from asynctensorrlhf.losses.ppo import compute_ppo_loss

behaviour, advantages = -torch.rand(4, 6), torch.randn(4, 6)
policy, mask = behaviour + torch.randn(4, 6), torch.rand(4, 6) < 0.7
for compute in (compute_ppo_loss, compute_m2po_loss):
    loss = lambda *tensors: compute(*tensors).loss
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaf, compiled_leaf = (policy.clone().requires_grad_() for _ in range(2))
    loss(leaf, behaviour, advantages, mask).backward()
    compiled(compiled_leaf, behaviour, advantages, mask).backward()
    torch.testing.assert_close(compiled_leaf.grad, leaf.grad)
"""


def test_losses_compile_to_one_graph():
    # In a process of its own: here the records are built under shape checks, which the compiler can't trace.
    subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, check=True, timeout=300)


@pytest.mark.parametrize("name", ["ppo", "grpo", "m2po"])
def test_the_functions_default_to_what_the_config_says(name):
    config = yaml.safe_load((ROOT / "conf" / "loss" / f"{name}.yaml").read_text())
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    compute = {"ppo": compute_ppo_loss, "grpo": compute_grpo_loss, "m2po": compute_m2po_loss}[name]
    loss_class = {"ppo": PPO, "grpo": GRPO, "m2po": M2PO}[name]
    assert {field.name for field in fields(loss_class)} == config.keys()
    parameters = inspect.signature(compute).parameters
    assert {key: parameters[key].default for key in config} == config
