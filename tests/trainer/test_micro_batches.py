import random

import pytest
import torch

from asynctensorrlhf.trainer.micro_batches import BatchCutter
from asynctensorrlhf.types import TrainBatch
from tests.policy.tiny import tiny_batch


def random_batch(seed: int) -> TrainBatch:
    draw = random.Random(seed)
    prompts = [draw.randint(1, 9) for _ in range(draw.randint(1, 12))]
    return tiny_batch(prompts, [[draw.randint(1, 20) for _ in range(draw.randint(1, 6))] for _ in prompts])


def num_columns(batch: TrainBatch, part: list[int], *, share_prompt: bool) -> int:
    prompts = batch.prompt_index[part]
    num_prompts = len(prompts.unique()) if share_prompt else len(prompts)
    longest_prompt = int(batch.prompt_lengths[prompts].max())
    return num_prompts * longest_prompt + len(part) * int(batch.completion_lengths[part].max())


@pytest.mark.parametrize("share_prompt", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_no_part_is_over_the_budget_and_each_sample_is_in_one(seed: int, share_prompt: bool) -> None:
    batch, max_tokens = random_batch(seed), 15 + 7 * seed
    samples = [sample for sample in range(batch.num_samples) if sample % 5]
    parts = BatchCutter(batch).micro_batches(samples, max_tokens=max_tokens, share_prompt=share_prompt)
    for part in parts:
        assert len(part) == 1 or num_columns(batch, part, share_prompt=share_prompt) <= max_tokens
    assert sorted(sample for part in parts for sample in part) == samples


def test_a_sample_over_the_budget_goes_alone() -> None:
    batch = tiny_batch([3, 3], [[2, 2], [30, 2]])
    parts = BatchCutter(batch).micro_batches(range(4), max_tokens=16, share_prompt=True)
    assert parts == [[0, 1, 3], [2]]


def test_a_group_within_the_budget_is_not_split() -> None:
    batch = tiny_batch([4] * 6, [[5, 2, 3, 1]] * 6)
    cutter = BatchCutter(batch)
    parts = cutter.micro_batches(range(24), max_tokens=60, share_prompt=True)
    for part in parts:
        assert all(len(group) == 4 for group in cutter.groups(part))


def test_groups_of_similar_length_meet() -> None:
    batch = tiny_batch([2] * 4, [[1, 1], [40, 40], [1, 1], [40, 40]])
    parts = BatchCutter(batch).micro_batches(range(8), max_tokens=170, share_prompt=True)
    assert parts == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_one_large_budget_makes_one_part() -> None:
    batch = random_batch(3)
    parts = BatchCutter(batch).micro_batches(range(batch.num_samples), max_tokens=10**6, share_prompt=True)
    assert len(parts) == 1


def test_no_samples_make_no_parts() -> None:
    assert BatchCutter(random_batch(0)).micro_batches([], max_tokens=10, share_prompt=True) == []


def test_ranks_share_whole_groups_by_tokens() -> None:
    batch = tiny_batch([2] * 5, [[30, 30], [10, 10], [10, 10], [10, 10], [1, 1]])
    cutter = BatchCutter(batch)
    shares = [cutter.share(range(10), rank=rank, num_ranks=2) for rank in range(2)]
    assert shares == [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_shares_of_all_ranks_are_the_whole(num_ranks: int) -> None:
    batch = random_batch(5)
    cutter, samples = BatchCutter(batch), list(range(1, batch.num_samples))
    shares = [cutter.share(samples, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sorted(sample for share in shares for sample in share) == samples


def test_minibatches_are_runs_of_whole_groups_in_admission_order() -> None:
    batch = tiny_batch([2] * 5, [[1, 1], [1], [1, 1, 1], [1], [1, 1]])
    cutter = BatchCutter(batch)
    assert cutter.minibatches(2) == [[0, 1, 2], [3, 4, 5, 6, 7, 8]]
    assert cutter.minibatches(9) == [[0, 1], [2], [3, 4, 5], [6], [7, 8]]


def test_select_keeps_rows_prompts_and_no_column_too_many() -> None:
    batch = tiny_batch([3, 9, 5], [[4, 12], [1, 2], [6, 3]])
    part = BatchCutter(batch).select(batch, [5, 0])
    assert part.prompt_ids.shape == (2, 5)
    assert part.completion_ids.shape == (2, 4)
    assert part.prompt_index.tolist() == [1, 0]
    assert part.prompt_lengths.tolist() == [3, 5]
    for row, sample in enumerate([5, 0]):
        prompt, kept_prompt = batch.prompt_ids[batch.prompt_index[sample]], part.prompt_ids[part.prompt_index[row]]
        length = batch.prompt_lengths[batch.prompt_index[sample]]
        assert torch.equal(kept_prompt[:length], prompt[:length])
        for name in ("completion_ids", "behaviour_logprobs", "token_versions", "advantages", "loss_mask"):
            whole, kept = getattr(batch, name)[sample, :4], getattr(part, name)[row]
            torch.testing.assert_close(kept, whole, rtol=0, atol=0, equal_nan=True)
        for name in ("completion_lengths", "rewards"):
            assert getattr(part, name)[row] == getattr(batch, name)[sample]
