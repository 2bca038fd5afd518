"""The value head's loss: golden numbers, clip, mask."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.value import clipped_value_loss

TRUE = torch.ones(1, 1, dtype=torch.bool)


def of(value, *, old=0.2, target=1.0, clip_eps=0.2):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    old, target = (torch.tensor([[number]], dtype=torch.float64) for number in (old, target))
    output = clipped_value_loss(values, old, target, TRUE, clip_eps=clip_eps, global_num_tokens=1.0)
    output.loss.backward()
    return output.loss.item(), values.grad.item(), output.metrics["value/clip_fraction"].item()


def test_loss_and_gradient_equal_the_golden_vector(golden):
    vector = golden("gae_value_clip")
    values = vector.inputs["value_pred"].clone().requires_grad_()
    returns = torch.tensor(vector.expected["returns"], dtype=vector.dtype)
    output = clipped_value_loss(
        values,
        vector.inputs["values"],
        returns,
        vector.mask,
        clip_eps=vector.config["cliprange_value"],
        global_num_tokens=vector.mask.sum(),
    )
    output.loss.backward()
    vector.check(output.loss, "value_loss")
    vector.check(values.grad, "grad_value_pred")
    vector.check(output.metrics["value/clip_fraction"], "value_clip_frac")


@pytest.mark.parametrize(
    ("value", "clip_eps", "loss", "gradient", "clipped"),
    [
        (0.6, 0.2, 0.18, 0.0, 1.0),  # moved towards the target far enough
        (0.3, 0.2, 0.245, -0.7, 0.0),  # within the radius
        (-0.4, 0.2, 0.98, -1.4, 0.0),  # moved away: the worse of the two counts
        (0.6, None, 0.08, -0.4, 0.0),
    ],
)
def test_hand_computed_values(value, clip_eps, loss, gradient, clipped):
    assert of(value, clip_eps=clip_eps) == pytest.approx((loss, gradient, clipped), abs=1e-12)


def test_rounding_within_the_radius_is_no_clip():
    generator = torch.Generator().manual_seed(0)
    old, values, target = (0.1 * torch.rand(1, 512, generator=generator) for _ in range(3))
    values.requires_grad_()
    mask = torch.ones(1, 512, dtype=torch.bool)
    output = clipped_value_loss(values, old, target, mask, clip_eps=0.2, global_num_tokens=512.0)
    output.loss.backward()
    assert output.metrics["value/clip_fraction"] == 0
    torch.testing.assert_close(values.grad, (values.detach() - target) / 512)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_masked_positions_change_no_bit(poison, clip_eps):
    mask = torch.tensor([[True, False]])
    results = []
    for filler in (0.0, poison):
        tensors = [torch.tensor([[number, filler]]) for number in (0.5, 0.1, 1.0)]
        tensors[0].requires_grad_()
        output = clipped_value_loss(*tensors, mask, clip_eps=clip_eps, global_num_tokens=1.0)
        output.loss.backward()
        results.append((output.loss.item(), tensors[0].grad.tolist(), output.metrics["value/clip_fraction"].item()))
    assert results[0] == results[1]


@pytest.mark.parametrize("which", range(3))
def test_a_live_nan_reaches_the_loss(which):
    tensors = [torch.full((1, 1), math.nan if place == which else 0.3) for place in range(3)]
    assert clipped_value_loss(*tensors, TRUE, clip_eps=0.2, global_num_tokens=1.0).loss.isnan()


def test_nothing_trained_costs_nothing_and_keeps_its_graph():
    values = torch.tensor([[math.nan]], requires_grad=True)
    output = clipped_value_loss(values, values, values, ~TRUE, clip_eps=0.2, global_num_tokens=0.0)
    output.loss.backward()
    assert (output.loss.item(), values.grad.item()) == (0.0, 0.0)


def test_low_precision_values_are_squared_in_float32():
    values, old, returns = (torch.tensor([[number]], dtype=torch.bfloat16) for number in (1.0, 1.0, 1.1))
    output = clipped_value_loss(values, old, returns, TRUE, clip_eps=None, global_num_tokens=1.0)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == 0.5 * (1.0 - returns.item()) ** 2
