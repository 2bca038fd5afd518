"""AIPO: differentiated through the minimum, so that nothing above the cap is trained."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.aipo import AIPO
from asynctensorrlhf.losses.policy_loss import whole_batch
from tests.losses.composed import composed


def test_loss_and_gradient_equal_the_golden_vector(golden):
    vector = golden("pg_with_is_weights")
    policy, *rest = vector.plain()
    output = composed(AIPO, ratio_cap=1.3)(whole_batch(policy, *rest))
    output.loss.backward()
    vector.check(output.loss, "variants", "aipo_surrogate_delta_1.3", "loss")
    vector.check(policy.grad, "variants", "aipo_surrogate_delta_1.3", "grad_logp_new")


def test_only_tokens_above_the_cap_lose_their_gradient_and_are_counted():
    policy = torch.tensor([[0.5, 2.0], [0.6, 0.8]], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    output = composed(AIPO, ratio_cap=1.3, aggregation="token_sum")(
        whole_batch(policy, torch.zeros_like(policy), advantages, mask)
    )
    output.loss.backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-0.5, 0.0], [0.6, 0.8]], dtype=torch.float64))
    assert output.metrics["loss/clip_fraction"] == 0.25


def test_above_the_cap_bad_tokens_have_no_gradient_either():
    policy = torch.full((1, 1), 0.7, requires_grad=True)  # ratio 2.01
    inputs = whole_batch(policy, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))
    output = composed(AIPO, ratio_cap=1.3)(inputs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1.3)
    assert policy.grad.item() == 0.0


@pytest.mark.parametrize("cap", [0.0, math.nan])
def test_a_cap_that_trains_nothing_is_refused_by_name(cap):
    with pytest.raises(ValueError, match=f"^loss.ratio_cap must be > 0, got {cap}"):
        composed(AIPO, ratio_cap=cap)
