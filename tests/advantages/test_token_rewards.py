"""Rewards of tokens: where the score lands, what KL costs, and what masked positions may hold."""

from __future__ import annotations

import math

import pytest
import torch

from asynctensorrlhf.advantages.token_rewards import reference_kl, token_rewards
from tests.losses.conftest import TOLERANCE, Golden

MASK = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])
SCORES = torch.tensor([1.0, -2.0, 5.0])[:, None].expand(3, 3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rewards_equal_the_golden_vector(dtype):
    vector = Golden("gae_value_clip", dtype)
    kl = reference_kl(vector.inputs["logp_old"], vector.inputs["logp_ref"], vector.mask)
    scores = vector.inputs["scores"][:, None].expand(vector.mask.shape)
    vector.check(token_rewards(scores, vector.mask, kl, vector.config["kl_coef"]), "token_rewards")


def test_the_score_is_at_the_last_trained_token_of_each_sample():
    assert token_rewards(SCORES, MASK, None, 0.0).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, -2.0], [0.0, 0.0, 0.0]]


def test_kl_is_subtracted_at_every_trained_token():
    kl = torch.where(MASK, 0.5, 0.0)
    expected = torch.tensor([[-0.1, 0.9, 0.0], [0.0, -0.1, -2.1], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(token_rewards(SCORES, MASK, kl, 0.2), expected)


def test_kl_is_policy_minus_reference_within_its_limit_and_zero_behind_the_mask():
    policy = torch.tensor([[-1.0, -1.0, math.nan]])
    reference = torch.tensor([[-1.5, -200.0, math.inf]])
    assert reference_kl(policy, reference, torch.tensor([[True, True, False]])).tolist() == [[0.5, 20.0, 0.0]]


def test_what_masked_positions_hold_changes_nothing():
    poisoned = torch.where(MASK, SCORES, math.nan)
    assert torch.equal(token_rewards(poisoned, MASK, None, 0.0), token_rewards(SCORES, MASK, None, 0.0))
