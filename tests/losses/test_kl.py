"""KL estimators: golden values, gradients, exact expectations, and that a step lowers the divergence."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.kl import KL_ESTIMATORS, k3
from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.surrogate import log_ratio
from tests.losses.composed import composed

NAMES = {"k1": "k1", "k2": "k2", "k3": "k3", "k3_plus": "k3_plus", "k3_unbiased": "k3_is_unbiased"}
USEFUL = [name for name in KL_ESTIMATORS if name != "k1"]
UNBIASED = [name for name in KL_ESTIMATORS if name.endswith("_unbiased")]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_of_tokens_equal_the_golden_vector(golden, name):
    vector = golden("kl_estimators")
    policy = vector.inputs["logp_new"].clone().requires_grad_()
    d, sampler = (log_ratio(policy, vector.inputs[other], vector.mask) for other in ("logp_ref", "logp_old"))
    value = KL_ESTIMATORS[name](d, sampler)
    value.sum().backward()
    vector.check(value, "tokens", NAMES[name], "value")
    vector.check(policy.grad, "tokens", NAMES[name], "grad")


def expected_gradient(vector, name, sampler):
    """Gradient by the logits of the estimator's mean over all actions, weighted by who samples them."""
    theta = vector.inputs["theta"].clone().requires_grad_()
    policy = theta.log_softmax(0)[None]
    value = KL_ESTIMATORS[name](policy - vector.inputs["pi_ref"].log(), policy - sampler(policy).log())
    (sampler(policy) * value).sum().backward()
    return theta.grad


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", "k1_in_loss"),
        ("k2", "k2_in_loss"),
        ("k3", "k3_in_loss"),
        ("k3_plus", "k2_in_loss"),
    ],
)
def test_the_expected_gradient_on_fresh_tokens_equals_the_golden_vector(golden, name, expected):
    vector = golden("kl_estimators")
    gradient = expected_gradient(vector, name, lambda policy: policy.detach().exp())
    vector.check(gradient, "expected_gradients", expected)


@pytest.mark.parametrize("name", UNBIASED)
def test_the_unbiased_ones_have_the_exact_gradient_on_tokens_of_another_policy(golden, name):
    vector = golden("kl_estimators")
    gradient = expected_gradient(vector, name, lambda policy: vector.inputs["mu"][None])
    vector.check(gradient, "exact_grad_reverse_kl")


def test_k3_on_fresh_tokens_follows_the_other_divergence(golden):
    vector = golden("kl_estimators")
    vector.check(expected_gradient(vector, "k3", lambda policy: policy.detach().exp()), "exact_grad_forward_kl")


def test_detaching_the_weight_of_k3_would_follow_the_other_divergence(golden):
    vector = golden("kl_estimators")
    theta = vector.inputs["theta"].clone().requires_grad_()
    policy, mu = theta.log_softmax(0)[None], vector.inputs["mu"][None]
    weight = (policy - mu.log()).detach().exp()
    (mu * weight * k3(policy - vector.inputs["pi_ref"].log(), policy)).sum().backward()
    vector.check(theta.grad, "expected_gradients", "k3_is_weight_detached_offpolicy")


@pytest.mark.parametrize("name", ["k1_unbiased", "k2_unbiased"])
def test_the_other_unbiased_ones_have_the_stated_gradient(name):
    policy = torch.tensor([[-1.0, -0.4]], dtype=torch.float64, requires_grad=True)
    reference, sampler = torch.tensor([[-1.4, -0.1]]).double(), torch.tensor([[-1.2, -0.9]]).double()
    d, delta = policy - reference, policy - sampler
    KL_ESTIMATORS[name](d, delta).sum().backward()
    ratio = delta.exp()
    stated = {"k1_unbiased": ratio * (d + 1), "k2_unbiased": ratio * d}[name]
    torch.testing.assert_close(policy.grad, stated.detach())


def test_k3_is_clamped_as_in_the_golden_vector(golden):
    vector = golden("extreme_log_ratios")
    policy, reference = vector.inputs["logp_new"], vector.inputs["logp_old"]
    vector.check(k3(log_ratio(policy, reference, vector.mask), policy), "k3_clamped")


def test_k3_is_never_negative_for_tiny_float32_distances():
    d = torch.linspace(-1e-3, 1e-3, 2001)
    assert k3(d, d).min() >= 0


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_equal_policies_are_at_distance_zero(name):
    zero = torch.zeros(1, 3)
    assert not KL_ESTIMATORS[name](zero, zero).any()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("distance", [20.0, -20.0])
def test_the_largest_distance_stays_finite_with_its_gradient(name, distance):
    d = torch.full((1, 1), distance, requires_grad=True)
    KL_ESTIMATORS[name](d, d).sum().backward()
    assert KL_ESTIMATORS[name](d, d).isfinite().all()
    assert d.grad.isfinite().all()


@pytest.mark.parametrize("name", USEFUL)
def test_a_step_of_a_kl_only_objective_brings_the_policy_to_the_reference(name):
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(8, generator=generator).log_softmax(0)
    logits = torch.randn(8, generator=generator).requires_grad_()
    sampler = torch.randn(8, generator=generator) if name in UNBIASED else logits.detach()
    tokens = torch.multinomial(sampler.softmax(0), 4096, replacement=True, generator=generator).view(64, 64)
    loss = composed(kl_coef=1.0, kl_estimator=name, aggregation="seq_mean_token_mean")
    optimizer = torch.optim.SGD([logits], lr=0.2)

    def divergence():
        policy = logits.detach().log_softmax(0)
        return (policy.exp() * (policy - reference)).sum().item()

    before = divergence()
    inputs = whole_batch(
        logits.log_softmax(0)[tokens],
        sampler.log_softmax(0)[tokens],
        torch.zeros(64),
        torch.ones(64, 64, dtype=torch.bool),
        ref_logprobs=reference[tokens],
    )
    loss(inputs).loss.backward()
    optimizer.step()
    assert 0 < divergence() < 0.95 * before
    assert math.isfinite(before)
