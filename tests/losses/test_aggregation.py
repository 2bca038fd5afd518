"""The five means and their denominators."""

from __future__ import annotations

import pytest
import torch

from asynctensorrlhf.losses.aggregation import AGGREGATIONS, aggregate, check_aggregation, count_tokens_and_sequences


@pytest.mark.parametrize(("sequences", "suffix"), [("trained", ""), ("all", "/batch_denominator")])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_each_mode_equals_its_golden_number(golden, mode, sequences, suffix):
    vector = golden("loss_aggregation_modes")
    num_tokens, num_sequences = count_tokens_and_sequences(vector.mask, sequences)
    loss = aggregate(
        vector.inputs["per_token_loss"],
        vector.mask,
        mode=mode,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
        loss_scale=float(vector.config["scale"]),
    )
    vector.check(loss, mode.replace("_", "-") + suffix)


def test_counts_tell_trained_from_all_sequences():
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    assert [int(count) for count in count_tokens_and_sequences(mask, "trained")] == [3, 2]
    assert [int(count) for count in count_tokens_and_sequences(mask, "all")] == [3, 3]


@pytest.mark.parametrize("as_count", [float, torch.tensor], ids=["number", "tensor"])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_empty_batch_has_loss_zero_and_a_finite_zero_gradient(mode, as_count):
    per_token = torch.tensor([[float("nan"), 1e30]], requires_grad=True)
    mask = torch.zeros(1, 2, dtype=torch.bool)
    loss = aggregate(
        per_token, mask, mode=mode, global_num_tokens=as_count(0), global_num_sequences=as_count(0), loss_scale=2.0
    )
    loss.backward()
    assert loss.item() == 0.0
    assert per_token.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": "mean"}, "loss.aggregation must be one of token_mean"),
        ({"sequences": "some"}, "loss.sequences must be one of trained, all, got 'some'"),
        ({"aggregation": "seq_mean_token_sum_norm"}, "loss.loss_scale must be > 0 with"),
        ({"aggregation": "seq_mean_token_sum_norm", "loss_scale": 0.0}, "loss.loss_scale must be > 0 with"),
        ({"loss_scale": 8.0}, "loss.loss_scale must be null unless"),
    ],
)
def test_a_setting_that_cannot_work_or_would_not_be_read_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_aggregation(**{"aggregation": "token_mean", "sequences": "trained", "loss_scale": None, **changes})
