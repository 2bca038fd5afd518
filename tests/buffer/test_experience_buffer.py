"""The buffers for library use."""

from types import SimpleNamespace

import pytest
import torch

from asynctensorrlhf.buffer import BoundedReplayBuffer, ReplayBufferActor, VersionedReplayBuffer


def test_a_full_bounded_buffer_evicts_the_oldest_and_samples_remove_from_the_front():
    buffer = BoundedReplayBuffer(max_size=3)
    for exp in "abcde":
        buffer.push(exp)
    assert len(buffer) == 3
    assert buffer.num_dropped == 2
    assert buffer.sample(2) == ["c", "d"]
    assert buffer.sample(8) == ["e"]
    assert buffer.sample(8) == []


@pytest.mark.parametrize("max_size", [0, -1])
def test_a_buffer_without_room_is_refused(max_size):
    with pytest.raises(ValueError, match="max_size must be >= 1"):
        BoundedReplayBuffer(max_size=max_size)


def test_a_negative_sample_is_refused_and_removes_nothing():
    buffer = BoundedReplayBuffer(max_size=3)
    buffer.push(1)
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        buffer.sample(-1)
    assert len(buffer) == 1


def test_an_experience_at_exactly_the_limit_is_kept_and_an_older_one_is_not():
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=2)
    for version in (1, 3, 2, 4):
        buffer.push({"made_by": version}, version=version)
    assert [exp["made_by"] for exp in buffer.sample(8, current_version=4)] == [3, 2, 4]
    assert buffer.num_dropped == 1


def test_what_is_already_too_old_is_dropped_at_push():
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=1)
    buffer.advance(5)
    buffer.push("old", version=3)
    buffer.push("at the limit", version=4)
    assert len(buffer) == 1
    assert buffer.num_dropped == 1


def test_a_stale_push_does_not_push_a_fresh_one_out():
    buffer = VersionedReplayBuffer(max_size=1, max_staleness=1)
    buffer.advance(5)
    buffer.push("fresh", version=5)
    buffer.push("old", version=0)
    assert buffer.sample(1) == ["fresh"]


def test_the_newest_version_can_come_from_a_version_manager():
    manager = SimpleNamespace(current=0)
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=1, version_manager=manager)
    buffer.push("x", version=0)
    manager.current = 1
    buffer.push("y", version=1)
    manager.current = 2
    assert buffer.sample(8) == ["y"]


@pytest.mark.parametrize("name", ["min_policy_version", "policy_version", "version"])
def test_the_version_is_read_from_the_experience_when_it_is_not_given(name):
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=0)
    buffer.push({name: 3})
    buffer.push(SimpleNamespace(**{name: 2}))
    assert buffer.sample(8, current_version=3) == [{name: 3}]


def test_the_oldest_version_of_an_experience_counts():
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=1)
    buffer.push({"min_policy_version": 0, "policy_version": 2})
    assert buffer.sample(8, current_version=2) == []


def test_an_experience_without_a_version_is_an_error():
    with pytest.raises(ValueError, match="version must be given"):
        VersionedReplayBuffer(max_size=8, max_staleness=1).push({"reward": 1.0})


def test_a_version_that_falls_is_an_error():
    buffer = VersionedReplayBuffer(max_size=8, max_staleness=1)
    buffer.advance(2)
    with pytest.raises(ValueError, match="version must be >= 2, got 1"):
        buffer.advance(1)


def test_what_comes_out_is_what_was_pushed_whatever_the_caller_does_later():
    buffer = BoundedReplayBuffer(max_size=4)
    exp = {"ids": torch.tensor([1, 2]), "log": ["a"]}
    for value in (5, 6):
        exp["ids"].fill_(value)
        buffer.push(exp)
        exp["log"].append("b")
    assert [(out["ids"].tolist(), out["log"]) for out in buffer.sample(4)] == [([5, 5], ["a"]), ([6, 6], ["a", "b"])]


@pytest.mark.parametrize("make", [lambda: BoundedReplayBuffer(64), lambda: ReplayBufferActor(BoundedReplayBuffer(64))])
def test_pushes_and_samples_from_many_threads_lose_and_double_nothing(call, make):
    buffer = make()
    pushers = [call(lambda k=k: [buffer.push(1000 * k + i) for i in range(500)]) for k in range(3)]
    samplers = [call(lambda: [exp for _ in range(400) for exp in buffer.sample(3)]) for _ in range(2)]
    for pusher in pushers:
        pusher.result()
    seen = [exp for sampler in samplers for exp in sampler.result()] + buffer.sample(64)
    assert len(seen) == len(set(seen))
    assert len(seen) + buffer.num_dropped == 1500


def test_an_actor_passes_calls_on_and_hides_the_rest():
    buffer = VersionedReplayBuffer(max_size=2, max_staleness=0)
    actor = ReplayBufferActor(buffer)
    actor.push("x", version=1)
    assert len(actor) == len(buffer) == 1
    assert actor.sample(1, current_version=1) == ["x"]
    with pytest.raises(AttributeError, match="_shelf"):
        _ = actor._shelf


def test_an_actor_without_a_buffer_has_one_of_its_own():
    actor = ReplayBufferActor(max_size=2)
    for item in "abc":
        actor.push(item)
    assert actor.sample(5) == ["b", "c"]
