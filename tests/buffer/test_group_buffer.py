"""The group buffer for library use."""

import math
from types import SimpleNamespace

import pytest
import torch

from asynctensorrlhf.buffer import GroupAwareReplayBuffer, GroupBufferEntry


def entry(group_id, index, reward=0.0, **more):
    return GroupBufferEntry(group_id, f"{group_id}{index}", reward, sample_index=index, **more)


def centred(rewards):
    return rewards - rewards.mean()


def names(groups):
    return [[one.sample for one in group] for group in groups]


def test_only_complete_groups_come_out_in_the_order_of_completion_and_of_their_samples():
    buffer = GroupAwareReplayBuffer(group_size=2)
    for group_id, index in (("a", 1), ("b", 1), ("b", 0), ("c", 0)):
        buffer.push(entry(group_id, index))
    assert len(buffer) == 1
    assert names(buffer.sample(9)) == [["b0", "b1"]]
    buffer.push(entry("a", 0))
    assert names(buffer.sample(9)) == [["a0", "a1"]]


def test_unequal_groups_stay_whole():
    buffer = GroupAwareReplayBuffer(group_size=4)
    for size, group_id in ((4, "a"), (3, "b"), (4, "c")):
        for index in range(size):
            buffer.push(entry(group_id, index, group_size=size))
    assert [len(group) for group in buffer.sample(9)] == [4, 3, 4]


def test_advantages_are_computed_once_from_the_complete_group_and_stored():
    calls = []

    def advantage_fn(rewards):
        calls.append(rewards.tolist())
        return centred(rewards)

    buffer = GroupAwareReplayBuffer(group_size=3, advantage_fn=advantage_fn)
    for index, reward in ((2, 3.0), (0, torch.tensor(0.5)), (1, 1.0)):
        buffer.push(entry("a", index, reward))
    (group,) = buffer.sample(1)
    assert calls == [[0.5, 1.0, 3.0]]
    assert [float(one.advantage) for one in group] == [-1.0, -0.5, 1.5]


def test_capacity_counts_groups_and_the_oldest_complete_one_goes():
    buffer = GroupAwareReplayBuffer(group_size=2, max_groups=2)
    for group_id in "abc":
        for index in range(2):
            buffer.push(entry(group_id, index))
    assert names(buffer.sample(9)) == [["b0", "b1"], ["c0", "c1"]]
    assert buffer.dropped == {"evicted": 1}


def test_groups_that_never_complete_do_not_pile_up():
    buffer = GroupAwareReplayBuffer(group_size=2, max_incomplete=3)
    for group_id in range(10):
        buffer.push(entry(group_id, 0))
    assert buffer.num_dropped == 7
    buffer.push(entry(9, 1))
    assert names(buffer.sample(9)) == [["90", "91"]]


def test_a_group_is_as_old_as_its_oldest_sample():
    manager = SimpleNamespace(current=3)
    buffer = GroupAwareReplayBuffer(group_size=2, max_staleness=1, version_manager=manager)
    for group_id, versions in (("a", (1, 3)), ("b", (2, 3))):
        for index, version in enumerate(versions):
            buffer.push(entry(group_id, index, policy_version=version))
    assert names(buffer.sample(9)) == [["b0", "b1"]]
    assert buffer.dropped == {"stale": 1}


def test_staleness_is_checked_again_at_sample():
    buffer = GroupAwareReplayBuffer(group_size=1, max_staleness=1)
    for version in (0, 1):
        buffer.push(entry(version, 0, policy_version=version))
    assert names(buffer.sample(9, current_version=2)) == [["10"]]


@pytest.mark.parametrize("rewards", [(0.5, 0.5), (math.nan, math.nan), (math.nan, 2.0)])
def test_groups_without_variance_are_filtered(rewards):
    buffer = GroupAwareReplayBuffer(group_size=2, filter_zero_variance=True)
    for group_id, pair in (("a", rewards), ("b", (0.5, 0.75))):
        for index, reward in enumerate(pair):
            buffer.push(entry(group_id, index, reward))
    assert names(buffer.sample(9)) == [["b0", "b1"]]
    assert buffer.dropped == {"zero_variance": 1}


def test_equal_rewards_and_payloads_that_cannot_be_compared_are_no_trouble():
    buffer = GroupAwareReplayBuffer(group_size=2)
    for group_id in ("a", "b"):
        for _ in range(2):
            buffer.push(GroupBufferEntry(group_id, {"ids": torch.ones(2)}, 1.0))
    assert [[one.sample_index for one in group] for group in buffer.sample(2)] == [[0, 1], [0, 1]]


def test_a_sample_that_comes_twice_or_does_not_fit_is_an_error():
    buffer = GroupAwareReplayBuffer(group_size=2)
    buffer.push(entry("a", 0))
    for bad in (entry("a", 0), entry("a", 2), entry("a", -1)):
        with pytest.raises(ValueError, match="sample_index must be new and below 2"):
            buffer.push(bad)
    with pytest.raises(ValueError, match="group_size must be 2, got 3"):
        buffer.push(entry("a", 1, group_size=3))
    assert len(buffer) == 0


def test_a_refused_first_sample_leaves_no_group_behind():
    buffer = GroupAwareReplayBuffer(group_size=2, max_groups=1)
    buffer.push(entry("a", 0))
    with pytest.raises(ValueError, match="sample_index"):
        buffer.push(entry("b", 7))
    buffer.push(entry("a", 1))
    assert names(buffer.sample(1)) == [["a0", "a1"]]


def test_what_comes_out_is_what_was_pushed_whatever_the_caller_does_later():
    buffer = GroupAwareReplayBuffer(group_size=2)
    ids, reward = torch.tensor([1, 2]), torch.tensor(0.5)
    for index in range(2):
        buffer.push(GroupBufferEntry("a", {"ids": ids}, reward, sample_index=index))
        ids.fill_(9)
        reward.fill_(9.0)
    first, second = buffer.sample(1)[0]
    assert (first.sample["ids"].tolist(), float(first.reward)) == ([1, 2], 0.5)
    assert (second.sample["ids"].tolist(), float(second.reward)) == ([9, 9], 9.0)


def test_samples_pushed_from_many_threads_make_whole_groups(call):
    buffer = GroupAwareReplayBuffer(group_size=4, max_groups=200)
    pushers = [call(lambda i=i: [buffer.push(entry(group_id, i)) for group_id in range(100)]) for i in range(4)]
    for pusher in pushers:
        pusher.result()
    groups = buffer.sample(200)
    assert sorted(group[0].group_id for group in groups) == list(range(100))
    assert all([one.sample_index for one in group] == [0, 1, 2, 3] for group in groups)


@pytest.mark.parametrize("group_size", [0, -2])
def test_an_empty_group_is_refused(group_size):
    with pytest.raises(ValueError, match="group_size must be >= 1"):
        GroupAwareReplayBuffer(group_size=group_size)


def test_groups_that_fill_up_side_by_side_are_not_evicted_before_they_are_complete():
    buffer = GroupAwareReplayBuffer(group_size=2, max_groups=2)
    for index in range(2):
        for group_id in "abcd":
            buffer.push(entry(group_id, index))
    assert names(buffer.sample(9)) == [["c0", "c1"], ["d0", "d1"]]
    assert buffer.dropped == {"evicted": 2}
