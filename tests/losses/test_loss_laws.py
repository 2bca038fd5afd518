"""What holds of every loss: masked positions are without influence, and the cut of the batch does not matter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.losses.policy_gradient import Reinforce
from asynctensorrlhf.losses.proximal import loglinear_logprobs
from tests.losses.composed import LOGPROBS, LOSSES, PER_TOKEN, annotated, composed, full_inputs, rows, run

POISONS = (math.nan, math.inf, -math.inf, 1e30, -1000.0)
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def poisoned(inputs, poison):
    """Every input that has a token axis holds the poison where masked."""
    whole = int(poison) if abs(poison) < 1e6 else -1
    changes = {
        name: torch.where(inputs.loss_mask, value, poison if value.is_floating_point() else whole)
        for name, value in ((name, getattr(inputs, name)) for name in PER_TOKEN)
    }
    return replace(inputs, **changes)


def assert_same_bits(actual, expected):
    (output, gradients), (clean, clean_gradients) = actual, expected
    assert torch.equal(output.loss, clean.loss)
    assert torch.equal(gradients, clean_gradients)
    assert output.metrics == clean.metrics
    assert (output.maxima, output.minima) == (clean.maxima, clean.minima)


def assert_close(actual, expected):
    torch.testing.assert_close({k: v.detach() for k, v in actual.items()}, {k: v.detach() for k, v in expected.items()})


@each_loss
def test_masked_positions_change_no_bit_of_loss_gradient_or_metric(loss):
    inputs = full_inputs(dtype=torch.float32)
    clean = run(loss, annotated(loss, inputs))
    for poison in POISONS:
        assert_same_bits(run(loss, annotated(loss, poisoned(inputs, poison))), clean)


@each_loss
def test_no_intermediate_gradient_is_nan_behind_the_mask(loss):
    with torch.autograd.set_detect_anomaly(True):
        run(loss, annotated(loss, poisoned(full_inputs(), math.nan)))


@each_loss
def test_a_plan_drops_trained_tokens_only_and_only_where_the_loss_asks_for_one(loss):
    inputs = annotated(loss, full_inputs(spread=1.0))
    assert (inputs.plan is not None) == ("plan" in loss.needs)
    if inputs.plan is not None:
        assert not (inputs.plan.keep_mask & ~inputs.loss_mask).any()
        assert inputs.plan.num_kept == inputs.plan.keep_mask.sum()


@each_loss
@given(
    seed=st.integers(0, 2**16),
    columns=st.integers(0, 3),
    empty_rows=st.integers(0, 3),
    order=st.permutations(range(5)),
)
@settings(max_examples=3, deadline=None)
def test_neither_padding_nor_the_order_of_the_samples_changes_anything(loss, seed, columns, empty_rows, order):
    inputs = full_inputs(seed=seed)
    if loss.sequences == "all":
        empty_rows = 0
    moved = {}
    for name in (*PER_TOKEN, "loss_mask"):
        value = getattr(inputs, name)
        padding = math.nan if value.is_floating_point() else 0
        moved[name] = torch.nn.functional.pad(value[list(order)], (0, columns, 0, empty_rows), value=padding)
    output, gradients = run(loss, annotated(loss, inputs))
    moved_output, moved_gradients = run(loss, annotated(loss, replace(inputs, **moved)))
    assert_close({**moved_output.metrics, "loss": moved_output.loss}, {**output.metrics, "loss": output.loss})
    torch.testing.assert_close(moved_gradients[:, :5, : gradients.shape[2]], gradients[:, list(order)])


@each_loss
@given(seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=2, deadline=None)
def test_micro_batches_of_any_cut_add_up_to_the_whole(loss, seed, data):
    inputs = annotated(loss, full_inputs(num_samples=7, seed=seed, spread=1.0))
    home = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=7, max_size=7)))
    output, gradients = run(loss, inputs)
    expected = {**output.metrics, "loss": output.loss}
    total = dict.fromkeys(expected, torch.zeros((), dtype=torch.float64))
    parts = []
    for micro_batch in range(4):  # some are empty
        part, part_gradients = run(loss, rows(inputs, home == micro_batch))
        torch.testing.assert_close(part_gradients, gradients[:, home == micro_batch])
        total = {name: value + {**part.metrics, "loss": part.loss}[name] for name, value in total.items()}
        parts.append(part)
    assert_close(total, expected)
    assert output.maxima == {name: max(part.maxima[name] for part in parts) for name in output.maxima}
    assert output.minima == {name: min(part.minima[name] for part in parts) for name in output.minima}


@each_loss
def test_samples_with_advantage_zero_can_be_left_out(loss):
    inputs = full_inputs()
    advantages = inputs.advantages.clone()
    advantages[::2] = 0.0
    whole = annotated(loss, replace(inputs, advantages=advantages))
    output, gradients = run(loss, whole)
    assert gradients[:, ::2].any() == loss.acts_without_advantage
    if loss.acts_without_advantage:
        return
    heard, heard_gradients = run(loss, rows(whole, slice(1, None, 2)))
    torch.testing.assert_close(heard.loss, output.loss)
    torch.testing.assert_close(heard_gradients, gradients[:, 1::2])
    exact = [name for name in output.metrics if name.startswith("loss/")]
    assert "loss/policy" in exact
    assert_close({name: heard.metrics[name] for name in exact}, {name: output.metrics[name] for name in exact})


@each_loss
def test_a_fully_masked_batch_has_loss_zero_and_finite_zero_gradients(loss):
    inputs = full_inputs()
    for name in PER_TOKEN[:-1]:
        inputs = replace(inputs, **{name: torch.full_like(getattr(inputs, name), math.nan)})
    empty = annotated(loss, replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask)))
    output, gradients = run(loss, empty)
    assert output.loss.item() == 0.0
    assert not gradients.any()
    assert all(math.isfinite(value) for value in (*output.metrics.values(), *output.maxima.values()))


@each_loss
@pytest.mark.parametrize("difference", [200.0, -200.0])
@pytest.mark.parametrize("moved", [("policy_logprobs",), ("policy_logprobs", "proximal_logprobs"), ("ref_logprobs",)])
def test_extreme_live_log_ratios_give_a_finite_loss_and_gradient(loss, moved, difference):
    inputs = full_inputs(dtype=torch.float32)
    changes = {name: getattr(inputs, name) + difference for name in moved}
    advantages = torch.tensor([0.0, 1.0, -1.0, 1.0, -1.0])[:, None].expand_as(inputs.loss_mask)
    output, gradients = run(loss, annotated(loss, replace(inputs, advantages=advantages, **changes)))
    assert output.loss.isfinite()
    assert gradients.isfinite().all()
    for values in (output.metrics, output.maxima, output.minima):
        assert all(value.isfinite() for value in values.values())


def inputs_in_the_loss(loss):
    """Names of the floating inputs that the value of this loss depends on."""
    names = {"policy_logprobs", "advantages"} | (loss.needs & {"proximal_logprobs", "ref_logprobs", "entropy"})
    is_weight_one = isinstance(loss, Reinforce) and loss.ratio_cap is None
    if loss.correction.is_active or not (loss.proximal == "recompute" or is_weight_one):
        names.add("behaviour_logprobs")
    return sorted(names)


@each_loss
def test_a_live_nan_reaches_the_loss(loss):
    inputs = full_inputs(spread=0.05)
    for name in inputs_in_the_loss(loss):
        value = getattr(inputs, name).clone()
        value[2, 1] = math.nan
        assert loss(annotated(loss, replace(inputs, **{name: value}))).loss.isnan(), name


@each_loss
def test_untouched_weights_have_ratio_one_and_nothing_is_clipped_or_corrected(loss):
    inputs = full_inputs()
    same = replace(inputs, **dict.fromkeys(LOGPROBS, inputs.behaviour_logprobs))
    output, _ = run(loss, annotated(loss, same))
    metrics = output.metrics
    ones = {"ratio/mean", "ratio/m2_ratio", "ratio/mult_prob_error", "correction/weight_mean"} & metrics.keys()
    torch.testing.assert_close([metrics[name].item() for name in sorted(ones)], [1.0] * len(ones))
    for name, value in metrics.items():
        if name.startswith(("kl/", "loss/clip", "loss/masked", "ratio/approx", "ratio/abs")) or "changed" in name:
            assert value == 0, name
    assert output.maxima["ratio/max"] == output.minima["ratio/min"] == 1
    assert output.maxima["ratio/abs_log_ratio_max"] == 0


@each_loss
def test_a_step_against_the_gradient_makes_good_samples_likelier_and_bad_ones_less(loss):
    if loss.acts_without_advantage:
        loss = replace(loss, kl_coef=0.0, entropy_coef=0.0)
    inputs = full_inputs(spread=0.01)
    inputs = replace(inputs, advantages=inputs.advantages[:, :1].expand_as(inputs.loss_mask))
    _, gradients = run(loss, annotated(loss, inputs))
    mask = inputs.loss_mask
    assert torch.equal(gradients[0][mask].sign(), -inputs.advantages[mask].sign())


def is_plain_derivative(name, loss):
    """Whether nothing in this loss is a constant that depends on the policy."""
    has_constants = name.lower().startswith(("cispo", "topr", "dppo")) or (
        name.lower().startswith("reinforce") and loss.ratio_cap is not None
    )
    straight_through = loss.kl_coef > 0 and loss.kl_estimator in ("k3_plus", "k2_unbiased")
    return not has_constants and not straight_through and loss.proximal != "loglinear"


PLAIN_DERIVATIVES = {name: loss for name, loss in LOSSES.items() if is_plain_derivative(name, loss)}


@pytest.mark.parametrize("loss", PLAIN_DERIVATIVES.values(), ids=PLAIN_DERIVATIVES)
def test_the_gradient_is_the_derivative_of_the_loss(loss):
    inputs = annotated(loss, full_inputs(seed=3))
    evaluate = lambda policy, entropy: loss(replace(inputs, policy_logprobs=policy, entropy=entropy)).loss  # noqa: E731
    leaves = [value.clone().requires_grad_() for value in (inputs.policy_logprobs, inputs.entropy)]
    assert torch.autograd.gradcheck(evaluate, leaves, fast_mode=True)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.proximal == "loglinear"])
def test_the_guessed_proximal_policy_is_a_constant(name):
    loss, inputs = LOSSES[name], full_inputs()
    guess = loglinear_logprobs(inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.token_versions, 10)
    output, gradients = run(loss, annotated(loss, inputs))
    given, given_gradients = run(
        replace(loss, proximal="recompute"), annotated(loss, replace(inputs, proximal_logprobs=guess))
    )
    torch.testing.assert_close(given.loss, output.loss)
    torch.testing.assert_close(given_gradients, gradients)


@each_loss
def test_low_precision_inputs_are_computed_in_float32(loss):
    inputs = full_inputs(dtype=torch.float32)
    names = [name for name in PER_TOKEN if name not in ("token_versions", "advantages")]
    low = {name: getattr(inputs, name).bfloat16() for name in names}
    output, gradients = run(loss, annotated(loss, replace(inputs, **low)))
    wide, wide_gradients = run(
        loss, annotated(loss, replace(inputs, **{name: value.float() for name, value in low.items()}))
    )
    assert output.loss.dtype == torch.float32
    assert torch.equal(output.loss, wide.loss)
    assert output.metrics == wide.metrics
    assert gradients.dtype == torch.bfloat16
    torch.testing.assert_close(gradients, wide_gradients.bfloat16())


@each_loss
def test_it_never_asks_the_device_for_a_value(loss):
    inputs = full_inputs()
    on_meta = {name: getattr(inputs, name).to("meta") for name in (*PER_TOKEN, "loss_mask")}  # has no values
    output = loss(annotated(loss, replace(inputs, **on_meta)))
    assert output.loss.is_meta
    assert all(value.is_meta for value in output.metrics.values())


def test_what_a_loss_needs_is_what_its_stages_read():
    assert composed().needs == frozenset()
    assert composed(proximal="recompute", kl_coef=0.1, entropy_coef=-0.1).needs == {
        "proximal_logprobs",
        "ref_logprobs",
        "entropy",
    }
    assert not composed(proximal="recompute").acts_without_advantage
    assert composed(kl_coef=0.1).acts_without_advantage
    assert composed(entropy_coef=0.1).acts_without_advantage
