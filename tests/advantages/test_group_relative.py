"""Group-relative advantages: golden numbers, degenerate groups, unscored samples, groups of any size."""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctensorrlhf.advantages.group_relative import GroupRelative, group_advantages, lacks_variance
from tests.advantages.batches import batch_inputs

TESTS = Path(__file__).parents[1]
CONFIG = TESTS.parent / "conf" / "advantage" / "group_relative.yaml"
VECTORS = {
    vector["id"]: vector for vector in json.loads((TESTS / "golden" / "loss_vectors.json").read_text())["vectors"]
}
GROUPS, DEGENERATE = VECTORS["group_advantages"], VECTORS["group_advantages_degenerate"]
OPTIONS = {
    "adv_baseline": "mean",
    "adv_std": "population",
    "adv_std_level": "group",
    "adv_eps": 1e-8,
    "adv_tol": 1e-6,
}
PAPER = GroupRelative(**OPTIONS)
TOLERANCE = {torch.float64: {"rtol": 0.0, "atol": 1e-9}, torch.float32: {"rtol": 2e-5, "atol": 2e-6}}
KINDS = {
    "population": {"adv_std": "population"},
    "sample": {"adv_std": "sample"},
    "mean": {"adv_std": "none"},
    "rloo": {"adv_std": "none", "adv_baseline": "leave_one_out"},
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("key", [key for key in GROUPS["expected"] if "/eps=" in key])
def test_each_kind_equals_its_golden_numbers(key, dtype):
    kind, adv_eps = key.split("/eps=")
    rewards = torch.tensor(GROUPS["inputs"]["rewards"], dtype=dtype)
    expected = torch.tensor(GROUPS["expected"][key], dtype=dtype)
    options = {**KINDS[kind], "adv_eps": float(adv_eps)}
    in_groups = GroupRelative(**{**OPTIONS, **options})(rewards.view(3, 4)).flatten()
    flat = group_advantages(rewards, torch.tensor(GROUPS["inputs"]["group_ids"]), **options)
    torch.testing.assert_close(in_groups, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(flat, expected, **TOLERANCE[dtype])


def test_groups_without_variance_are_told_as_in_the_golden_vector():
    rewards = torch.tensor(GROUPS["inputs"]["rewards"]).view(3, 4)
    assert lacks_variance(rewards, 1e-6).tolist() == GROUPS["expected"]["degenerate_group"][::4]


@pytest.mark.parametrize("case", DEGENERATE["inputs"])
def test_degenerate_groups_in_float32_equal_the_golden_vector(case):
    config = DEGENERATE["config"]
    advantage = GroupRelative(**{**OPTIONS, "adv_eps": config["adv_eps"], "adv_tol": config["tol"]})
    advantages = advantage(torch.tensor([DEGENERATE["inputs"][case]], dtype=torch.float32))
    expected = torch.tensor([DEGENERATE["expected"][case]], dtype=torch.float32)
    if not expected.any():
        assert not advantages.any()
    torch.testing.assert_close(advantages, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("adv_std", ["population", "sample", "none"])
@pytest.mark.parametrize(
    "group",
    [[5.0], [0.7] * 8, [1e6] * 3, [math.nan, 5.0], [math.nan] * 3, [0.1, 0.1 + 1e-7], [1e6, 1e6 + 0.5]],
    ids=str,
)
def test_no_variance_or_a_single_score_gives_exactly_zero(adv_std, group):
    advantage = GroupRelative(**{**OPTIONS, "adv_std": adv_std, "adv_eps": 0.0})
    assert advantage(torch.tensor([group])).tolist() == [[0.0] * len(group)]


def test_one_right_answer_of_two_is_worth_one_by_population_and_less_by_sample_std():
    pair = torch.tensor([[1.0, 0.0]])
    by_std = {
        adv_std: GroupRelative(**{**OPTIONS, "adv_std": adv_std})(pair)[0].tolist()
        for adv_std in ("population", "sample", "none")
    }
    assert by_std["population"] == pytest.approx([1.0, -1.0])
    assert by_std["sample"] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert by_std["none"] == [0.5, -0.5]


@pytest.mark.parametrize("adv_std", ["population", "sample", "none"])
def test_unscored_samples_are_left_out_of_mean_and_std_and_get_zero(adv_std):
    advantage = GroupRelative(**{**OPTIONS, "adv_std": adv_std})
    advantages = advantage(torch.tensor([[2.0, math.nan, 0.5, 1.0, math.nan], [0.0, 1.0, 5.0, 2.0, 3.0]]))
    scored = advantage(torch.tensor([[2.0, 0.5, 1.0]]))
    assert advantages[0, [1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(advantages[0, [0, 2, 3]], scored[0])


@pytest.mark.parametrize("scores", [[2.0, 0.5, 1.0], [3.0, -1.0]])
def test_leave_one_out_is_the_reward_less_the_mean_of_the_other_scored_samples(scores):
    advantage = GroupRelative(**{**OPTIONS, "adv_baseline": "leave_one_out", "adv_std": "none"})
    advantages = advantage(torch.tensor([[*scores, math.nan]], dtype=torch.float64))
    others = [(sum(scores) - score) / (len(scores) - 1) for score in scores]
    assert advantages[0].tolist() == pytest.approx([a - b for a, b in zip(scores, others, strict=True)] + [0.0])


@pytest.mark.parametrize(("adv_std", "ddof"), [("population", 0), ("sample", 1)])
def test_the_std_of_the_batch_is_of_all_scored_rewards_and_leaves_silent_groups_at_zero(adv_std, ddof):
    rewards = torch.tensor([[1.0, 0.0, math.nan], [1.0, 1.0, 1.0], [0.0, 0.5, 2.0]], dtype=torch.float64)
    advantage = GroupRelative(**{**OPTIONS, "adv_std": adv_std, "adv_std_level": "batch", "adv_eps": 1e-3})
    advantages = advantage.over_batch(batch_inputs(rewards, advantage)).advantages.view(3, 3, 2)
    std = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 2.0], dtype=torch.float64).std(correction=ddof)
    assert advantages[0, 0].tolist() == pytest.approx([0.5 / (std.item() + 1e-3)] * 2)
    assert advantages[0, 2].tolist() == [0.0, 0.0]
    assert not advantages[1].any()


def test_a_batch_of_equal_rewards_has_advantages_exactly_zero_even_without_eps():
    advantage = GroupRelative(**{**OPTIONS, "adv_std_level": "batch", "adv_eps": 0.0})
    inputs = batch_inputs(torch.full((2, 2), 0.7), advantage)
    assert not advantage.over_batch(inputs).advantages.any()


def test_group_level_advantages_go_through_the_batch_untouched():
    inputs = batch_inputs(torch.tensor([[1.0, 0.0]]), PAPER)
    assert PAPER.over_batch(inputs).advantages is inputs.group_advantages


def test_an_infinite_reward_is_seen_and_not_silenced():
    assert PAPER(torch.tensor([[math.inf, 0.0, 1.0]])).isnan().any()


def test_low_precision_rewards_are_normalised_in_float32():
    advantages = PAPER(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.bfloat16))
    assert advantages.dtype == torch.float32
    assert advantages[0].tolist() == pytest.approx([math.sqrt(2), -math.sqrt(0.5), -math.sqrt(0.5)])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_flat_groups_of_any_size_and_order_equal_each_group_alone(data):
    ids = torch.tensor(data.draw(st.lists(st.integers(-1, 2), min_size=1, max_size=12)))
    value = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.25, 1.0, 3.5]))
    rewards = torch.tensor(data.draw(st.lists(value, min_size=len(ids), max_size=len(ids))), dtype=torch.float64)
    advantages = group_advantages(rewards, ids)
    for group in ids.unique():
        alone = PAPER(rewards[ids == group][None])[0]
        torch.testing.assert_close(advantages[ids == group], alone)


def test_it_never_asks_the_device_for_a_value():
    rewards, ids = torch.zeros(4, device="meta"), torch.zeros(4, dtype=torch.long, device="meta")  # without values
    assert PAPER(rewards.view(2, 2)).is_meta
    assert group_advantages(rewards, ids).is_meta


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adv_std": "unbiased"}, "advantage.adv_std must be one of population, sample, none, got 'unbiased'"),
        ({"adv_baseline": "median"}, "advantage.adv_baseline must be one of mean, leave_one_out, got 'median'"),
        ({"adv_std_level": "all"}, "advantage.adv_std_level must be one of group, batch, got 'all'"),
        (
            {"adv_std_level": "batch", "adv_std": "none"},
            "advantage.adv_std_level=batch says whose .*advantage.adv_std=none none does",
        ),
        ({"adv_eps": -1.0}, "advantage.adv_eps must be >= 0, got -1.0"),
        ({"adv_tol": math.nan}, "advantage.adv_tol must be >= 0, got nan"),
    ],
)
def test_an_impossible_setting_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        GroupRelative(**{**OPTIONS, **changes})


def test_the_function_defaults_to_what_the_config_says():
    config = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if not key.startswith("_")}
    assert {field.name for field in fields(GroupRelative)} == config.keys()
    parameters = inspect.signature(group_advantages).parameters
    assert {key: parameters[key].default for key in config if key != "adv_std_level"} == {
        key: value for key, value in config.items() if key != "adv_std_level"
    }
