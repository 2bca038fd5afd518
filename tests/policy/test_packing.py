import pytest
import torch

from asynctensorrlhf.policy.packing import pack
from tests.policy.tiny import tiny_batch


def test_a_shared_prompt_is_laid_out_once_and_the_last_tokens_not_at_all() -> None:
    batch = tiny_batch([10, 20], [[3, 5, 2], [4, 1]])
    rows = pack(batch, share_prompt=True)
    num_inputs = int((rows.input_ids != 0).sum())
    assert num_inputs == 10 + 20 + (2 + 4 + 1) + (3 + 0)


def test_short_trees_share_rows() -> None:
    batch = tiny_batch([6] * 16, [[3] * 4] * 16)  # 16 trees of 14 columns
    rows = pack(batch, share_prompt=True)
    assert rows.input_ids.shape == (4, 4 * 14)


def test_rows_are_at_most_twice_as_wide_as_the_longest_sample() -> None:
    batch = tiny_batch([20], [[60] * 6])
    rows = pack(batch, share_prompt=True)
    assert rows.input_ids.shape[1] <= 2 * (20 + 59)
    # two completions fit behind each copy of the prompt
    assert rows.input_ids.shape[0] == 3


def test_samples_of_a_group_need_not_be_neighbours() -> None:
    batch = tiny_batch([4, 5], [[2, 3], [4, 2]])
    order = torch.tensor([2, 0, 3, 1])
    shuffled = type(batch)(
        **{
            name: value if name in ("prompt_ids", "prompt_lengths") else value[order]
            for name, value in vars(batch).items()
        }
    )
    rows = pack(shuffled, share_prompt=True)
    assert int((rows.input_ids != 0).sum()) == 4 + 5 + 1 + 2 + 3 + 1


@pytest.mark.parametrize("share_prompt", [True, False])
def test_sources_point_at_the_token_before_each_target(share_prompt: bool) -> None:
    batch = tiny_batch([3, 4], [[3, 1], [2]])
    rows = pack(batch, share_prompt=share_prompt)
    ids, positions = rows.input_ids.flatten()[rows.sources], rows.position_ids.flatten()[rows.sources]
    prompts, completions = batch.prompt_ids, batch.completion_ids
    before = [prompts[0, 2], completions[0, 0], completions[0, 1], prompts[0, 2], prompts[1, 3], completions[2, 0]]
    assert ids.tolist() == [int(token) for token in before]
    assert positions.tolist() == [2, 3, 4, 2, 3, 4]
    assert rows.targets.tolist() == completions[batch.completion_mask].tolist()


def test_plain_rows_need_no_mask() -> None:
    rows = pack(tiny_batch([3, 4], [[3, 1], [2]]), share_prompt=False)
    assert rows.attention_mask is None
    assert rows.input_ids.shape == (3, 5)
