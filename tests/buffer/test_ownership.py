"""Copies that nobody else can write to."""

import torch

from asynctensorrlhf.buffer.ownership import own_group, own_value
from asynctensorrlhf.types import Ticket


def test_an_owned_group_equals_the_original_and_shares_no_memory(group_of):
    given = group_of(Ticket(3, 0), lengths=(4, 1, 2), rewards=(0.1, 0.2, 0.7))
    owned = own_group(given)
    assert owned.prompt is given.prompt
    assert owned.rewards.tolist() == given.rewards.tolist()
    for before, after in zip(given.samples, owned.samples, strict=True):
        for name in ("completion_ids", "behaviour_logprobs", "token_versions"):
            assert torch.equal(getattr(before, name), getattr(after, name))
            assert getattr(before, name).data_ptr() != getattr(after, name).data_ptr()


def test_an_owned_group_does_not_keep_the_engines_tensors_alive(group_of):
    slots = torch.zeros(1000, 1000)
    given = group_of(Ticket(0, 0), lengths=(2,), rewards=(1.0,))
    object.__setattr__(given.samples[0], "behaviour_logprobs", slots[0, :2])
    assert own_group(given).samples[0].behaviour_logprobs.untyped_storage().nbytes() == 2 * 4


def test_owned_containers_are_copies_all_the_way_down(group_of):
    tensor = torch.tensor([1.0, 2.0])
    given = {"ids": [1, [2]], "pair": (tensor, {"x": tensor}), "group": group_of(Ticket(0, 0))}
    owned = own_value(given)
    given["ids"][1].append(3)
    tensor.zero_()
    given["group"].samples[0].completion_ids.zero_()
    assert owned["ids"] == [1, [2]]
    assert owned["pair"][0].tolist() == owned["pair"][1]["x"].tolist() == [1.0, 2.0]
    assert owned["group"].samples[0].completion_ids.tolist() == [1, 2]


def test_owned_tensors_are_detached_normal_tensors_without_a_base():
    leaf = torch.ones(3, requires_grad=True)
    assert not own_value([leaf * 2])[0].requires_grad
    with torch.inference_mode():
        assert not own_value({"x": torch.ones(2)})["x"].is_inference()
    assert own_value([torch.zeros(1000, 1000)[0, :2]])[0].untyped_storage().nbytes() == 2 * 4
