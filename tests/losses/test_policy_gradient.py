"""REINFORCE, CISPO and TOPR: golden numbers, and that every trained token keeps a gradient."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.policy_gradient import CISPO, TOPR, Reinforce
from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.surrogate import weighted_policy_gradient
from tests.losses.composed import composed

VARIANTS = {
    "reinforce_tis_C2": composed(Reinforce, ratio_cap=2.0),
    "topr": composed(TOPR),
    "cispo_eps_high_0.28_no_low": composed(CISPO),
    "cispo_two_sided_0.2_0.28": composed(CISPO, clip_eps_low=0.2),
}
RATIOS = torch.tensor([[0.5, 1.0, 1.5, 10.0]] * 2, dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0] * 4, [-1.0] * 4], dtype=torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradient_equal_the_golden_vector(golden, variant):
    vector = golden("pg_with_is_weights")
    policy, *rest = vector.plain()
    output = VARIANTS[variant](whole_batch(policy, *rest))
    output.loss.backward()
    vector.check(output.loss, "variants", variant, "loss")
    vector.check(policy.grad, "variants", variant, "grad_logp_new")


def weights_of(loss):
    """The weight of each token, read off the gradient -w A / 8, and the share said to be bounded."""
    policy = RATIOS.log().requires_grad_()
    output = loss(whole_batch(policy, torch.zeros_like(policy), ADVANTAGES, torch.ones(2, 4, dtype=torch.bool)))
    output.loss.backward()
    return (-policy.grad * 8 / ADVANTAGES), output.metrics["loss/bounded_weight_fraction"].item()


@pytest.mark.parametrize(
    ("loss", "good", "bad", "bounded"),
    [
        (composed(Reinforce, ratio_cap=None), [1, 1, 1, 1], [1, 1, 1, 1], 6 / 8),
        (composed(Reinforce, ratio_cap=2.0), [0.5, 1, 1.5, 2], [0.5, 1, 1.5, 2], 2 / 8),
        (composed(CISPO), [0.5, 1, 1.28, 1.28], [0.5, 1, 1.28, 1.28], 4 / 8),
        (composed(CISPO, clip_eps_low=0.2), [0.8, 1, 1.28, 1.28], [0.8, 1, 1.28, 1.28], 6 / 8),
        (composed(TOPR), [1, 1, 1, 1], [0.5, 1, 1, 1], 5 / 8),
    ],
    ids=["reinforce", "capped", "cispo", "two-sided", "topr"],
)
def test_the_weights_are_bounded_and_never_zero(loss, good, bad, bounded):
    weights, fraction = weights_of(loss)
    torch.testing.assert_close(weights, torch.tensor([good, bad], dtype=torch.float64))
    assert fraction == bounded


def test_a_weight_is_a_constant():
    policy = torch.tensor([[-2.0]], requires_grad=True)
    loss = weighted_policy_gradient(policy, torch.ones(1, 1), policy.exp() / policy.detach().exp() * 0.5)
    loss.sum().backward()
    assert (loss.item(), policy.grad.item()) == (1.0, -0.5)


@pytest.mark.parametrize(
    ("loss_class", "changes", "message"),
    [
        (Reinforce, {"ratio_cap": 0.0}, "loss.ratio_cap must be > 0 or null, got 0.0"),
        (Reinforce, {"ratio_cap": math.nan}, "loss.ratio_cap must be > 0 or null, got nan"),
        (CISPO, {"clip_eps_low": 1.0}, r"loss.clip_eps_low must be in \(0, 1\) or null, got 1.0"),
        (CISPO, {"clip_eps_high": 0.0}, "loss.clip_eps_high must be > 0, got 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(loss_class, changes, message):
    with pytest.raises(ValueError, match="^" + message):
        composed(loss_class, **changes)
