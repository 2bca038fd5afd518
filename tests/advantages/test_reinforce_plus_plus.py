"""REINFORCE++: reward-to-go and its whitening over the batch, baselines, silent batches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from asynctensorrlhf.advantages.reinforce_plus_plus import ReinforcePlusPlus
from asynctensorrlhf.advantages.whitening import whiten
from tests.advantages.batches import batch_inputs

PLAIN = {"adv_baseline": "none", "gamma": 1.0, "kl_coef": 0.0, "adv_tol": 1e-6}
MASK = torch.tensor([[True, True, True], [True, False, True], [True, True, False], [True, False, False]])
REWARDS = torch.tensor([[1.0, 0.0], [0.5, 3.0]], dtype=torch.float64)


def over_batch(advantage, rewards=REWARDS, **changes):
    return advantage.over_batch(batch_inputs(rewards, advantage, loss_mask=MASK, **changes))


def test_every_token_has_the_score_of_its_sample_whitened_over_all_tokens():
    scores = torch.where(MASK, REWARDS.flatten()[:, None], 0.0)
    torch.testing.assert_close(over_batch(ReinforcePlusPlus(**PLAIN)).advantages, whiten(scores, MASK))


def test_a_discount_counts_trained_tokens_only():
    discounted = over_batch(ReinforcePlusPlus(**{**PLAIN, "gamma": 0.5})).advantages
    to_go = torch.tensor([[0.25, 0.5, 1.0], [0.0, 0.0, 0.0], [0.25, 0.5, 0.0], [3.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(discounted, whiten(to_go, MASK))


def test_kl_to_the_reference_costs_the_tokens_before_it_as_well():
    advantage = ReinforcePlusPlus(**{**PLAIN, "kl_coef": 0.1})
    policy = torch.where(MASK, -1.0, math.nan).double()
    reference = torch.where(MASK, -torch.tensor([2.0, 1.5, 1.0]), math.inf).double()
    output = over_batch(advantage, proximal_logprobs=policy, ref_logprobs=reference, kl_scale=2.0)
    kl = torch.where(MASK, torch.tensor([1.0, 0.5, 0.0]).double(), 0.0)
    to_go = REWARDS.flatten()[:, None] - 0.2 * kl.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(output.advantages, whiten(torch.where(MASK, to_go, 0.0), MASK))
    assert output.metrics["kl/reward_k1"].item() == pytest.approx(kl.sum().item() / MASK.sum().item())


def test_the_baseline_of_the_group_is_its_mean():
    advantage = ReinforcePlusPlus(**{**PLAIN, "adv_baseline": "group_mean"})
    deviation = torch.tensor([0.5, -0.5, -1.25, 1.25], dtype=torch.float64)[:, None]
    torch.testing.assert_close(over_batch(advantage).advantages, whiten(torch.where(MASK, deviation, 0.0), MASK))


def test_a_group_without_variance_is_zero_before_whitening():
    advantage = ReinforcePlusPlus(**{**PLAIN, "adv_baseline": "group_mean"})
    assert advantage(torch.tensor([[0.7, 0.7, 0.7], [1.0, math.nan, math.nan]])).tolist() == [[0.0] * 3, [0.0] * 3]


def test_an_unscored_sample_has_no_advantage_and_no_part_in_the_statistics():
    advantage = ReinforcePlusPlus(**PLAIN)
    rewards = torch.tensor([[1.0, math.nan], [0.5, 3.0]], dtype=torch.float64)
    output = over_batch(advantage, rewards)
    assert output.advantages[1].tolist() == [0.0, 0.0, 0.0]
    scores = torch.where(MASK, rewards.nan_to_num().flatten()[:, None], 0.0)
    scored = MASK & ~rewards.isnan().flatten()[:, None]
    torch.testing.assert_close(output.advantages, whiten(scores, scored))


@pytest.mark.parametrize("adv_baseline", ["none", "group_mean"])
@pytest.mark.parametrize("reward", [0.7, 1e6, math.nan])
def test_equal_rewards_are_advantages_of_exactly_zero(adv_baseline, reward):
    advantage = ReinforcePlusPlus(**{**PLAIN, "adv_baseline": adv_baseline})
    assert not over_batch(advantage, torch.full((2, 2), reward)).advantages.any()


def test_an_infinite_reward_is_seen_and_not_silenced():
    rewards = torch.tensor([[1.0, math.inf], [0.5, 3.0]])
    assert over_batch(ReinforcePlusPlus(**PLAIN), rewards).advantages.isnan().any()


def test_it_never_asks_the_device_for_a_value():
    advantage = ReinforcePlusPlus(**{**PLAIN, "adv_baseline": "group_mean"})
    inputs = batch_inputs(REWARDS, advantage, loss_mask=MASK)
    on_meta = {name: value.to("meta") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    assert advantage.over_batch(replace(inputs, **on_meta)).advantages.is_meta
    assert advantage(REWARDS.to("meta")).is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_baseline": "median"}, "advantage.adv_baseline must be one of none, group_mean, got 'median'"),
        ({"gamma": -1.0}, r"advantage.gamma must be in \[0, 1\], got -1.0"),
        ({"kl_coef": -0.1}, "advantage.kl_coef must be >= 0, got -0.1"),
        ({"adv_tol": math.nan}, "advantage.adv_tol must be >= 0, got nan"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        ReinforcePlusPlus(**{**PLAIN, **changes})
