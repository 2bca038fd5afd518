"""GRPO: its mean over sequences, and the loss from rewards."""

from __future__ import annotations

import pytest
import torch

from asynctensorrlhf.losses.grpo import compute_grpo_loss
from asynctensorrlhf.losses.ppo import compute_ppo_loss


def centred(rewards):
    """A group advantage without a divisor, written by hand."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def test_a_long_sequence_weighs_as_much_as_a_short_one():
    policy = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 4, [True] + [False] * 3])
    rewards = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    output = compute_grpo_loss(policy, torch.zeros_like(policy), rewards, mask, group_advantage=centred)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert policy.grad.tolist() == [[-1 / 8] * 4, [1 / 2, 0.0, 0.0, 0.0]]


def test_on_equal_lengths_it_is_ppo_of_the_group_advantages(make_inputs):
    inputs = make_inputs(num_samples=6)
    mask = torch.ones_like(inputs.loss_mask)
    rewards = torch.tensor([[0.0, 2.5, 1.0], [4.0, 4.0, 1.5]], dtype=torch.float64)
    plain = (inputs.policy_logprobs, inputs.behaviour_logprobs)
    from_rewards = compute_grpo_loss(*plain, rewards, mask, group_advantage=centred)
    from_advantages = compute_ppo_loss(*plain, centred(rewards).flatten(), mask)
    torch.testing.assert_close(from_rewards.loss, from_advantages.loss)


def test_rewards_that_do_not_fit_the_samples_are_refused(make_inputs):
    inputs = make_inputs(num_samples=5)
    plain = (inputs.policy_logprobs, inputs.behaviour_logprobs)
    with pytest.raises(ValueError, match=r"rewards must hold one per sample \(5\), got shape \(2, 2\)"):
        compute_grpo_loss(*plain, torch.zeros(2, 2), inputs.loss_mask, group_advantage=centred)
