"""GSPO: golden numbers, one clip for a whole sequence, the product as RLOO takes it."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.gspo import GSPO
from asynctensorrlhf.losses.policy_loss import whole_batch
from tests.losses.composed import composed

MASK = torch.tensor([[True, True]])


def test_loss_and_gradient_equal_the_golden_vector(golden):
    vector = golden("gspo")
    policy, *rest = vector.plain()
    output = composed(GSPO, clip_eps_low=0.05, clip_eps_high=0.06)(whole_batch(policy, *rest))
    output.loss.backward()
    vector.check(output.loss, "loss")
    vector.check(policy.grad, "grad_logp_new")
    vector.check(output.metrics["loss/clip_fraction"], "clip_frac")  # sequence 0 holds a third of the tokens too


def of(kind, deltas, advantage, **changes):
    policy = torch.tensor([deltas], dtype=torch.float64, requires_grad=True)
    inputs = whole_batch(policy, torch.zeros_like(policy), torch.tensor([advantage], dtype=torch.float64), MASK)
    output = composed(GSPO, sequence_ratio=kind, clip_eps_low=0.5, clip_eps_high=1.0, **changes)(inputs)
    output.loss.backward()
    return output.loss.item(), policy.grad[0].tolist(), output.metrics["loss/clip_fraction"].item()


@pytest.mark.parametrize(
    ("kind", "deltas", "loss", "gradient", "clipped"),
    [
        ("geometric", [0.9, 0.1], -math.exp(0.5), -math.exp(0.5) / 2, 0.0),
        ("product", [0.9, 0.1], -2.0, 0.0, 1.0),
        ("product", [0.4, 0.1], -math.exp(0.5), -math.exp(0.5), 0.0),
    ],
)
def test_all_tokens_share_a_ratio_and_a_clip(kind, deltas, loss, gradient, clipped):
    found, gradients, fraction = of(kind, deltas, 1.0)
    assert found == pytest.approx(loss)
    assert gradients == pytest.approx([gradient, gradient])
    assert fraction == clipped


def test_it_is_the_token_form_with_a_straight_through_ratio():
    policy = torch.tensor([[0.3, -0.1]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[1.5, 1.5]], dtype=torch.float64)
    inputs = whole_batch(policy, torch.zeros_like(policy), advantages, MASK)
    composed(GSPO, clip_eps_low=0.5, clip_eps_high=1.0)(inputs).loss.backward()
    ratio = policy.detach().mean().exp()
    torch.testing.assert_close(policy.grad, -ratio * advantages / 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_ratio": "sum"}, "loss.sequence_ratio must be one of product, geometric, got 'sum'"),
        ({"clip_eps_low": 1.0}, r"loss.clip_eps_low must be in \(0, 1\), got 1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match="^" + message):
        composed(GSPO, **changes)
