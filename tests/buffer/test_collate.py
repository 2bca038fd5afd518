"""Groups of unequal sizes and lengths to one batch."""

import pytest
import torch

from asynctensorrlhf.buffer.collate import collate
from asynctensorrlhf.types import Ticket


@pytest.fixture
def groups(group_of):
    return [
        group_of(Ticket(0, 0), group_id=2, lengths=(3, 1), rewards=(0.25, 1.5), version=4),
        group_of(Ticket(1, 0), group_id=0, lengths=(2, 5, 4), rewards=(0.5, float("nan"), 2.0), version=5),
    ]


def test_every_sample_keeps_its_tokens_and_padding_is_zero(groups):
    batch = collate(groups)
    samples = [sample for group in groups for sample in group.samples]
    assert batch.completion_lengths.tolist() == [3, 1, 2, 5, 4]
    for row, sample in enumerate(samples):
        length = len(sample.completion_ids)
        for name in ("completion_ids", "behaviour_logprobs", "token_versions"):
            assert getattr(batch, name)[row, :length].tolist() == getattr(sample, name).tolist()
            assert not getattr(batch, name)[row, length:].any()
    assert torch.equal(batch.loss_mask, batch.completion_mask)
    assert batch.loss_mask.sum(1).tolist() == [3, 1, 2, 5, 4]


def test_prompts_are_stored_once_and_found_by_index(groups):
    batch = collate(groups)
    assert batch.prompt_ids.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0]]
    assert batch.prompt_lengths.tolist() == [4, 2]
    assert batch.prompt_index.tolist() == [0, 0, 1, 1, 1]


def test_advantages_of_a_group_are_repeated_over_its_tokens_only(groups):
    batch = collate(groups)
    first = groups[0].advantages
    assert batch.advantages[0].tolist() == [first[0]] * 3 + [0.0] * 2
    assert batch.advantages[1].tolist() == [first[1]] + [0.0] * 4
    assert batch.rewards.isnan().tolist() == [False, False, False, True, False]


def test_a_nan_advantage_does_not_leak_into_padding(group_of):
    group = group_of(Ticket(0, 0), lengths=(1, 2), rewards=(float("nan"), 1.0))
    assert collate([group]).advantages.isnan().tolist() == [[True, False], [False, False]]


def test_truncated_samples_are_masked_whole_when_asked(groups):
    kept, masked = collate(groups), collate(groups, overlong="mask")
    is_truncated = [False, True, False, True, True]  # the builder truncates every sample but the first of a group
    assert masked.loss_mask.any(1).tolist() == [not cut for cut in is_truncated]
    assert torch.equal(masked.completion_mask, kept.completion_mask)
    assert torch.equal(masked.rewards.nan_to_num(), kept.rewards.nan_to_num())
    assert torch.equal(masked.advantages.nan_to_num(), kept.advantages.nan_to_num())


def test_logprobs_and_advantages_are_float32_whatever_the_engine_used(groups):
    for group in groups:
        for sample in group.samples:
            object.__setattr__(sample, "behaviour_logprobs", sample.behaviour_logprobs.to(torch.bfloat16))
    batch = collate(groups)
    assert batch.behaviour_logprobs.dtype == batch.advantages.dtype == batch.rewards.dtype == torch.float32
    assert batch.completion_ids.dtype == batch.token_versions.dtype == torch.int64


def test_changing_the_batch_does_not_change_the_groups(groups):
    collate(groups).completion_ids.zero_()
    assert groups[0].samples[0].completion_ids.tolist() == [21, 22, 23]


def test_collate_of_one_full_length_sample_owns_its_tensors(group_of):
    group = group_of(Ticket(0, 0), lengths=(2,), rewards=(1.0,))
    batch = collate([group])
    batch.completion_ids.zero_()
    batch.rewards.zero_()
    assert group.samples[0].completion_ids.tolist() == [1, 2]
    assert group.rewards.tolist() == [1.0]


def test_no_groups_are_an_error():
    with pytest.raises(ValueError, match="at least one group"):
        collate([])
