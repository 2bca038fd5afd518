"""Behaviour correction: every published row, ranges, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.losses.correction import RATIOS, NoCorrection
from asynctensorrlhf.losses.policy_loss import whole_batch
from asynctensorrlhf.losses.surrogate import log_ratio
from tests.losses.composed import composed, weights

MODES = {
    "token_truncate": weights(cap=2.0),
    "token_mask": weights(accept="token", low=0.5, high=2.0),
    "sequence_truncate": weights("sequence", cap=2.0),
    "sequence_mask": weights("sequence", accept="sequence", low=0.5, high=2.0),
    "icepop_0.5_5": weights(accept="token", low=0.5, high=5.0),
    "geo_rs_0.9_1.1": weights("one", accept="geometric", low=0.9, high=1.1),
    "seq_mask_tis_0.9_1.1": weights(accept="geometric", low=0.9, high=1.1),
}
TRUE = torch.ones(1, 2, dtype=torch.bool)


def of(correction, *ratios):
    delta = torch.tensor([ratios], dtype=torch.float64).log()
    return correction(delta, torch.ones_like(delta, dtype=torch.bool))


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_equals_the_golden_vector(golden, mode):
    vector = golden("tis_family")
    policy = vector.inputs["logp_new"].clone().requires_grad_()
    proximal, behaviour = vector.inputs["logp_old"], vector.inputs["logp_rollout"]
    found = MODES[mode](log_ratio(proximal, behaviour, vector.mask), vector.mask)
    vector.check(found.values, "modes", mode, "weights")
    loss = composed(clip_eps_high=0.2, dual_clip=None, proximal="recompute", correction=MODES[mode])
    output = loss(whole_batch(policy, behaviour, vector.inputs["advantages"], vector.mask, proximal_logprobs=proximal))
    output.loss.backward()
    vector.check(output.loss, "modes", mode, "loss")
    vector.check(policy.grad, "modes", mode, "grad_logp_new")


def test_every_mode_of_the_vector_is_tested(golden):
    assert golden("tis_family").expected["modes"].keys() == MODES.keys()


@pytest.mark.parametrize(("name", "expected"), [("token", "rho_token")])
def test_the_ratio_of_tokens_equals_the_golden_vector(golden, name, expected):
    vector = golden("tis_family")
    delta = log_ratio(vector.inputs["logp_old"], vector.inputs["logp_rollout"], vector.mask)
    vector.check(RATIOS[name](delta, vector.mask) * vector.mask, expected)


@pytest.mark.parametrize("name", ["sequence", "geometric"])
def test_the_ratio_of_sequences_equals_the_golden_vector(golden, name):
    vector = golden("tis_family")
    delta = log_ratio(vector.inputs["logp_old"], vector.inputs["logp_rollout"], vector.mask)
    vector.check(RATIOS[name](delta, vector.mask)[:, 0], f"rho_{name}")


def test_behaviour_weights_and_their_divergence_equal_the_golden_vector(golden):
    vector = golden("decoupled_ppo")
    delta = log_ratio(vector.inputs["logp_prox"], vector.inputs["logp_behave"], vector.mask)
    vector.check(weights()(delta, vector.mask).values, "behave_weight")


def test_a_cap_bounds_and_a_range_rejects():
    capped, rejected = of(weights(cap=2.0), 0.7, 6.7), of(weights(accept="token", low=0.5, high=5.0), 0.7, 6.7)
    torch.testing.assert_close(capped.values, torch.tensor([[0.7, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(rejected.values, torch.tensor([[0.7, 0.0]], dtype=torch.float64))
    assert capped.changed.tolist() == rejected.changed.tolist() == [[False, True]]


def test_a_range_holds_for_the_ratio_and_not_for_its_inverse():
    found = of(weights(accept="token", low=0.6, high=3.0), 0.55, 1.9)  # 1 / 0.55 = 1.82, 1 / 1.9 = 0.53
    torch.testing.assert_close(found.values, torch.tensor([[0.0, 1.9]], dtype=torch.float64))


def test_bounds_are_inclusive():
    assert not of(weights(accept="token", low=1.0), 1.0, 2.0).changed.any()
    assert not of(weights(accept="token", high=1.0), 1.0, 0.5).changed.any()


def test_long_sequences_with_noise_lose_their_product_but_not_their_geometric_mean():
    delta = torch.full((1, 4096), 0.002)
    mask = torch.ones_like(delta, dtype=torch.bool)
    assert weights("sequence", accept="sequence", low=0.5, high=2.0)(delta, mask).changed.all()
    assert not weights("one", accept="geometric", low=0.99, high=1.01)(delta, mask).changed.any()


def test_weights_carry_no_gradient():
    delta = torch.zeros(1, 2, requires_grad=True)
    assert not weights(cap=2.0)(delta, TRUE).values.requires_grad


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("accept", ["token", "sequence", "geometric"])
def test_a_live_nan_is_not_rejected(ratio, accept):
    delta = torch.tensor([[math.nan, 0.0]])
    assert weights(ratio, accept=accept, low=0.5, high=2.0)(delta, TRUE).values[0, 0].isnan()


def test_no_correction_has_no_weights():
    assert NoCorrection()(torch.zeros(1, 2), TRUE) is None
    assert not NoCorrection().is_active


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": "tokens"}, "loss.correction.ratio must be one of token, sequence, geometric, one, got 'tokens'"),
        ({"accept": "one", "low": 0.5}, "loss.correction.accept must be one of token, sequence, geometric or null"),
        ({"cap": 0.0}, "loss.correction.cap must be > 0 or null, got 0.0"),
        ({"cap": math.nan}, "loss.correction.cap must be > 0 or null, got nan"),
        ({"high": 2.0}, "loss.correction.accept_low and accept_high must be null without loss.correction.accept"),
        ({"accept": "token"}, "loss.correction.accept=token needs loss.correction.accept_low or accept_high"),
        ({"accept": "token", "low": -0.1}, "loss.correction.accept_low must be >= 0 and below accept_high"),
        ({"accept": "token", "low": math.nan}, "loss.correction.accept_low must be >= 0 and below accept_high"),
        ({"accept": "token", "low": 2.0, "high": 2.0}, "loss.correction.accept_low must be >= 0 and below accept_high"),
        ({"ratio": "one"}, "loss.correction.ratio=one weighs nothing.*use loss/correction=none"),
        (
            {"ratio": "one", "cap": 2.0, "accept": "token", "low": 0.5},
            "loss.correction.ratio=one weighs nothing.*cap null, got accept token, cap 2.0",
        ),
    ],
)
def test_a_correction_that_cannot_work_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match="^" + message):
        weights(**settings)
