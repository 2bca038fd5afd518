"""The log-ratio and the clipped surrogate, against hand-computed numbers."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.surrogate import check_trust_region, clipped_surrogate, log_ratio

# ratio, advantage -> loss, d loss / d log-prob; clip 0.2 / 0.28, so the band is [0.8, 1.28]
QUADRANTS = [
    (0.5, 1.0, -0.5, -0.5),
    (1.0, 1.0, -1.0, -1.0),
    (1.5, 1.0, -1.28, 0.0),
    (10.0, 1.0, -1.28, 0.0),
    (0.5, -1.0, 0.8, 0.0),
    (1.0, -1.0, 1.0, 1.0),
    (1.5, -1.0, 1.5, 1.5),
    (10.0, -1.0, 10.0, 10.0),
]
TRUE = torch.ones(1, 1, dtype=torch.bool)


def surrogate_and_gradient(ratio, advantage, **options):
    delta = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss = clipped_surrogate(delta, advantages, clip_eps_low=0.2, clip_eps_high=0.28, **options)
    loss.sum().backward()
    return loss.item(), delta.grad.item()


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), QUADRANTS)
def test_each_quadrant_has_its_loss_and_its_gradient(ratio, advantage, loss, gradient):
    assert surrogate_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-12)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), QUADRANTS)
def test_dual_clip_changes_only_large_ratios_of_bad_tokens(ratio, advantage, loss, gradient):
    if (ratio, advantage) == (10.0, -1.0):
        loss, gradient = 3.0, 0.0
    assert surrogate_and_gradient(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, gradient), abs=1e-12)


def test_low_precision_log_probs_are_subtracted_in_float32():
    policy, other = (torch.tensor([[-1.0]], dtype=torch.bfloat16), torch.tensor([[-0.9961]], dtype=torch.float32))
    delta = log_ratio(policy, other, TRUE)
    assert delta.dtype == torch.float32
    assert delta.item() == pytest.approx(-0.0039, abs=1e-6)


def test_the_compared_policy_is_a_constant():
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    log_ratio(logprobs, logprobs, TRUE).exp().sum().backward()
    assert logprobs.grad.item() == 1.0


@pytest.mark.parametrize("difference", [200.0, -200.0, 1e30, -1e30, math.inf, -math.inf])
def test_a_log_ratio_beyond_20_nats_is_clamped_and_has_no_gradient(difference):
    policy = torch.tensor([[difference]], requires_grad=True)
    delta = log_ratio(policy, torch.zeros(1, 1), TRUE)
    delta.exp().sum().backward()
    assert delta.item() == math.copysign(20.0, difference)
    assert policy.grad.item() == 0.0


def test_the_limit_of_a_log_ratio_can_be_set():
    policy = torch.tensor([[12.0, -3.0]], requires_grad=True)
    delta = log_ratio(policy, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), limit=5.0)
    delta.sum().backward()
    assert delta.tolist() == [[5.0, -3.0]]
    assert policy.grad.tolist() == [[0.0, 1.0]]


def test_a_live_nan_is_not_clamped_away():
    assert log_ratio(torch.tensor([[math.nan]]), torch.zeros(1, 1), TRUE).isnan().all()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"clip_eps_low": 1.0}, "loss.clip_eps_low must be in (0, 1), got 1.0"),
        ({"clip_eps_low": 0.0}, "loss.clip_eps_low must be in (0, 1), got 0.0"),
        ({"clip_eps_high": math.nan}, "loss.clip_eps_high must be > 0, got nan"),
        ({"dual_clip": 1.0}, "loss.dual_clip must be > 1 or null, got 1.0"),
    ],
)
def test_an_impossible_trust_region_is_refused_by_name(options, key):
    with pytest.raises(ValueError, match="^" + key.replace("(", r"\(").replace(")", r"\)")):
        check_trust_region(**{"clip_eps_low": 0.2, "clip_eps_high": 0.2, **options})
