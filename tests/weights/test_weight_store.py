import pytest
import torch

from asynctensorrlhf.weights.weight_store import WeightStore


def test_a_reader_keeps_its_snapshot_while_the_next_is_published():
    trained = {"w": torch.zeros(3)}
    store = WeightStore(trained, policy_version=4)
    held = store.latest()
    trained["w"] += 1
    store.publish(trained, policy_version=5)
    trained["w"] += 1
    assert held.policy_version == 4
    assert held.tensors["w"].tolist() == [0.0, 0.0, 0.0]
    assert store.latest().tensors["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("tensors", [{}, {"w": torch.zeros(2)}, {"w": torch.zeros(3), "b": torch.zeros(1)}])
def test_a_publication_of_other_names_or_shapes_is_refused_and_changes_nothing(tensors):
    store = WeightStore({"w": torch.zeros(3)}, policy_version=0)
    with pytest.raises(ValueError, match="differ from the last ones"):
        store.publish(tensors, policy_version=1)
    assert store.latest().policy_version == 0


def test_versions_must_rise():
    store = WeightStore({"w": torch.zeros(3)}, policy_version=2)
    with pytest.raises(ValueError, match="must rise above 2, got 2"):
        store.publish({"w": torch.zeros(3)}, policy_version=2)


def test_snapshots_carry_no_graph():
    store = WeightStore({"w": torch.zeros(3, requires_grad=True)}, policy_version=0)
    assert not store.latest().tensors["w"].requires_grad
