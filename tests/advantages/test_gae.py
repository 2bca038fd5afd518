"""GAE: golden numbers, the recursion by hand, gaps, bootstrapping, unscored samples, poison."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.advantages.critic import Critic
from asynctensorrlhf.advantages.gae import GAE, gae
from asynctensorrlhf.advantages.whitening import whiten
from tests.advantages.batches import batch_inputs
from tests.losses.conftest import TOLERANCE, Golden

CRITIC = Critic(lr=1e-3, num_warmup_steps=0, clip_eps=0.2, max_grad_norm=1.0)
PLAIN = {
    "gamma": 1.0,
    "lam": 0.95,
    "kl_coef": 0.0,
    "whiten": False,
    "bootstrap_truncated": False,
    "critic": CRITIC,
}
MASK = torch.tensor([[True, True, True], [True, False, True], [True, True, False], [False, False, False]])
REWARDS = torch.tensor([[1.0, -1.0], [0.5, 3.0]])


def slow_gae(rewards, values, mask, gamma, lam, bootstrap):
    """The textbook, one sample and one token at a time, on the trained tokens alone."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(len(values)):
        next_value, running = bootstrap[row], 0.0
        for column in [t for t in range(values.shape[1]) if mask[row, t]][::-1]:
            delta = rewards[row, column] + gamma * next_value - values[row, column]
            running = delta + gamma * lam * running
            next_value = values[row, column]
            advantages[row, column], returns[row, column] = running, running + values[row, column]
    return advantages, returns


def inputs_of(advantage, *, poison=0.0, **changes):
    """Four samples of two groups with values, policy and reference; masked positions hold the poison."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    policy = -torch.rand(4, 3, generator=generator, dtype=torch.float64)
    reference = policy - 0.3 * torch.randn(4, 3, generator=generator, dtype=torch.float64)
    fields = {
        "values": torch.cat([torch.where(MASK, values[:, :3], poison), values[:, 3:]], dim=1),
        "proximal_logprobs": torch.where(MASK, policy, poison),
        "ref_logprobs": torch.where(MASK, reference, poison),
        **changes,
    }
    return batch_inputs(REWARDS.double(), advantage, loss_mask=MASK, **fields)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_advantages_and_returns_equal_the_golden_vector(dtype):
    vector = Golden("gae_value_clip", dtype)
    rewards = torch.tensor(vector.expected["token_rewards"], dtype=dtype)
    config = vector.config
    advantages, returns = gae(rewards, vector.inputs["values"], vector.mask, gamma=config["gamma"], lam=config["lam"])
    vector.check(advantages, "advantages")
    vector.check(returns, "returns")


@given(
    seed=st.integers(0, 2**16),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.7, 1.0]),
    is_bootstrapped=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_it_equals_the_recursion_over_trained_tokens_one_by_one(seed, gamma, lam, is_bootstrapped):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 7, generator=generator) < 0.6
    bootstrap = torch.randn(5, generator=generator, dtype=torch.float64) * is_bootstrapped
    poisoned = (torch.where(mask, tensor, math.nan) for tensor in (rewards, values))
    actual = gae(*poisoned, mask, gamma=gamma, lam=lam, bootstrap_values=bootstrap if is_bootstrapped else None)
    torch.testing.assert_close(actual, slow_gae(rewards, values, mask, gamma, lam, bootstrap))


def test_the_score_reaches_every_token_and_returns_are_what_came():
    advantage = GAE(**{**PLAIN, "lam": 1.0})
    inputs = inputs_of(advantage)
    output = advantage.over_batch(inputs)
    scores = torch.where(MASK, REWARDS.double().flatten()[:, None], 0.0)
    torch.testing.assert_close(output.returns, scores)
    torch.testing.assert_close(output.advantages, torch.where(MASK, scores - inputs.values[:, :3], 0.0))


def test_whitening_moves_advantages_and_leaves_returns():
    plain, white = GAE(**PLAIN), GAE(**{**PLAIN, "whiten": True})
    before, after = (advantage.over_batch(inputs_of(advantage)) for advantage in (plain, white))
    torch.testing.assert_close(after.advantages, whiten(before.advantages, MASK))
    torch.testing.assert_close(after.returns, before.returns)
    assert after.returns is not None
    assert not torch.equal(after.advantages, before.advantages)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_pull_to_the_reference_is_in_the_rewards(scale):
    with_kl = GAE(**{**PLAIN, "kl_coef": 0.1, "lam": 1.0})
    inputs = inputs_of(with_kl, kl_scale=scale)
    output = with_kl.over_batch(inputs)
    kl = torch.where(MASK, inputs.proximal_logprobs - inputs.ref_logprobs, 0.0)
    cost_to_go = 0.1 * scale * kl.flip(1).cumsum(1).flip(1)
    without = GAE(**{**PLAIN, "lam": 1.0}).over_batch(inputs)
    torch.testing.assert_close(output.returns, torch.where(MASK, without.returns - cost_to_go, 0.0))
    assert output.metrics["kl/reward_k1"].item() == pytest.approx(kl.sum().item() / MASK.sum().item())


def test_an_unscored_sample_has_no_advantage_keeps_its_values_and_is_not_whitened_with():
    advantage = GAE(**{**PLAIN, "whiten": True})
    inputs = inputs_of(advantage)
    unscored = replace(inputs, rewards=inputs.rewards.index_fill(0, torch.tensor(1), math.nan))
    output = advantage.over_batch(unscored)
    assert output.advantages[1].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(output.returns[1], torch.where(MASK[1], inputs.values[1, :3], 0.0))
    alone = replace(inputs, loss_mask=MASK & (torch.arange(4) != 1)[:, None])
    torch.testing.assert_close(output.advantages, advantage.over_batch(alone).advantages)


def test_a_sample_that_the_limit_cut_is_worth_its_last_state_only_by_choice():
    truncated = torch.tensor([True, True, False, True])
    ended, cut = GAE(**PLAIN), GAE(**{**PLAIN, "bootstrap_truncated": True, "lam": 1.0, "gamma": 0.9})
    inputs = inputs_of(ended, is_truncated=truncated)
    assert torch.equal(ended.over_batch(inputs).advantages, ended.over_batch(inputs_of(ended)).advantages), (
        "by default it ended there"
    )
    output = cut.over_batch(inputs)
    last_value = inputs.values[0, 3]
    assert output.returns[0, 2].item() == pytest.approx((REWARDS[0, 0] + 0.9 * last_value).item())
    whole = cut.over_batch(replace(inputs, is_truncated=torch.zeros(4, dtype=torch.bool)))
    torch.testing.assert_close(output.returns[2], whole.returns[2])
    assert output.returns[3].tolist() == [0.0, 0.0, 0.0]


def test_a_bootstrap_reads_the_state_after_the_last_trained_token():
    cut = GAE(**{**PLAIN, "bootstrap_truncated": True, "lam": 1.0})
    inputs = inputs_of(cut, is_truncated=torch.tensor([False, False, True, False]))
    output = cut.over_batch(inputs)
    # sample 2 has two trained tokens: the state after them is at index 2
    assert output.returns[2, 1].item() == pytest.approx((REWARDS[1, 0] + inputs.values[2, 2]).item())


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_masked_positions_hold_changes_no_bit(poison):
    advantage = GAE(**{**PLAIN, "kl_coef": 0.1, "whiten": True})
    clean, poisoned = (advantage.over_batch(inputs_of(advantage, poison=value)) for value in (0.0, poison))
    assert torch.equal(poisoned.advantages, clean.advantages)
    assert torch.equal(poisoned.returns, clean.returns)
    assert poisoned.metrics == clean.metrics


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant_one():
    advantage = GAE(**{**PLAIN, "lam": 1.0})
    perfect = REWARDS.double().flatten()[:, None].expand(4, 4)
    constant = torch.full((4, 4), 0.3, dtype=torch.float64)
    for values, expected in ((perfect, 1.0), (constant, 0.0)):
        metrics = advantage.over_batch(inputs_of(advantage, values=values)).metrics
        assert metrics["value/explained_variance"].item() == pytest.approx(expected)


def test_it_asks_for_a_reference_only_with_a_coefficient():
    assert GAE(**PLAIN).needs == {"values"}
    assert GAE(**{**PLAIN, "kl_coef": 0.1}).needs == {"values", "proximal_logprobs", "ref_logprobs"}


def test_it_never_asks_the_device_for_a_value():
    advantage = GAE(**{**PLAIN, "kl_coef": 0.1, "whiten": True, "bootstrap_truncated": True})
    inputs = inputs_of(advantage)
    on_meta = {name: value.to("meta") for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    output = advantage.over_batch(replace(inputs, **on_meta))
    assert output.advantages.is_meta
    assert all(value.is_meta for value in output.metrics.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.1}, r"advantage.gamma must be in \[0, 1\], got 1.1"),
        ({"lam": -0.1}, r"advantage.lam must be in \[0, 1\], got -0.1"),
        ({"kl_coef": math.nan}, "advantage.kl_coef must be >= 0, got nan"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        GAE(**{**PLAIN, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "advantage.critic.lr must be > 0, got 0.0"),
        ({"num_warmup_steps": -1}, "advantage.critic.num_warmup_steps must be >= 0, got -1"),
        ({"clip_eps": 0.0}, "advantage.critic.clip_eps must be > 0 or null, got 0.0"),
        ({"max_grad_norm": -1.0}, "advantage.critic.max_grad_norm must be > 0 or null, got -1.0"),
    ],
)
def test_an_impossible_critic_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CRITIC, **changes)
