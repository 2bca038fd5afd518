import pytest
import torch

from asynctensorrlhf.advantages.group_relative import GroupRelative
from asynctensorrlhf.rollout.scoring import Scorer
from asynctensorrlhf.types import Sample
from tests.fakes import FunctionReward, make_prompt

ADVANTAGE = GroupRelative(adv_baseline="mean", adv_std="population", adv_std_level="group", adv_eps=1e-8, adv_tol=1e-6)


def sample(group_id, index, ids, versions):
    ids = torch.tensor(ids)
    return Sample(make_prompt(group_id, [7]), index, ids, torch.zeros(len(ids)), torch.tensor(versions), "stop")


GROUPS = [
    [sample(5, 0, [1, 2, 3], [4, 4, 6]), sample(5, 1, [1], [5])],
    [sample(3, 0, [9, 9], [6, 6]), sample(3, 1, [2, 2], [6, 7])],
]


class LengthPlusAnswer:
    """Reward: number of sampled tokens plus the row's answer."""

    def encode(self, rows, tokenizer):
        raise NotImplementedError

    def __call__(self, batch):
        assert torch.equal(batch.answers["gold"], batch.row_ids * 10)
        return batch.completion_mask.sum(1) + batch.answers["gold"]


def scorer(reward):
    return Scorer(reward=reward, answers={"gold": torch.arange(8) * 10}, advantage=ADVANTAGE)


def test_every_sample_gets_the_reward_of_its_own_ids_and_its_own_row():
    first, second = scorer(LengthPlusAnswer()).score(GROUPS)
    assert first.rewards.tolist() == [53.0, 51.0]
    assert second.rewards.tolist() == [32.0, 32.0]
    assert first.rewards.dtype == torch.float32
    torch.testing.assert_close(first.advantages, torch.tensor([1.0, -1.0]))
    assert second.advantages.tolist() == [0.0, 0.0]


def test_a_group_is_as_old_as_its_oldest_token():
    first, second = scorer(LengthPlusAnswer()).score(GROUPS)
    assert (first.min_policy_version, first.max_policy_version) == (4, 6)
    assert (second.min_policy_version, second.max_policy_version) == (6, 7)


def test_a_reward_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(4,\), got torch.Size\(\[4, 1\]\)"):
        scorer(FunctionReward(lambda batch: torch.zeros(4, 1))).score(GROUPS)


def test_an_inference_tensor_from_a_reward_becomes_a_normal_one():
    def reward(batch):
        with torch.inference_mode():
            return torch.tensor([0.25, 0.5, 0.75, 1.0])

    groups = scorer(FunctionReward(reward)).score(GROUPS)
    assert not any(group.rewards.is_inference() or group.advantages.is_inference() for group in groups)
    assert groups[1].rewards.tolist() == [0.75, 1.0]


def test_rewards_carry_no_graph_even_when_their_model_would():
    weight = torch.ones(1, requires_grad=True)
    groups = scorer(FunctionReward(lambda batch: weight * batch.completion_mask.sum(1))).score(GROUPS)
    assert not any(group.rewards.requires_grad for group in groups)


def test_no_groups_need_no_reward():
    assert scorer(LengthPlusAnswer()).score([]) == []
