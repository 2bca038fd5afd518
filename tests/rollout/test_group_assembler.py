import pytest
import torch

from asynctensorrlhf.rollout.group_assembler import GroupAssembler
from asynctensorrlhf.types import Sample
from tests.fakes import make_prompt


def sample(group_id, index):
    ones = torch.ones(2, dtype=torch.long)
    return Sample(make_prompt(group_id, [7]), index, ones, torch.zeros(2), ones, "stop")


def test_groups_come_out_when_their_last_sample_does_in_the_order_of_samples():
    assembler = GroupAssembler(2)
    assert assembler.add([sample(4, 1), sample(9, 0)]) == []
    groups = assembler.add([sample(9, 1), sample(4, 0)])
    assert [[(s.prompt.group_id, s.sample_index) for s in group] for group in groups] == [
        [(9, 0), (9, 1)],
        [(4, 0), (4, 1)],
    ]
    assert assembler.add([]) == []


@pytest.mark.parametrize("index", [0, 2])
def test_a_sample_that_comes_twice_or_lies_outside_the_group_is_an_error(index):
    assembler = GroupAssembler(2)
    assembler.add([sample(4, 0)])
    with pytest.raises(ValueError, match=f"sample {index} of group 4"):
        assembler.add([sample(4, index)])
