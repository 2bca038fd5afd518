"""The named buffers: what they refuse and what they are made of."""

import inspect
from pathlib import Path

import pytest
import yaml

from asynctensorrlhf.buffer import presets

CONF = Path(__file__).parents[2] / "conf" / "buffer"
GIVEN_BY_THE_RUN = {"groups_per_step", "wait_timeout_s", "synchronous"}


def settings_of(name, **changes):
    config = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if not key.startswith("_")} | changes


def make(name, groups_per_step=4, **changes):
    extra = {key: changes.pop(key) for key in ("synchronous", "wait_timeout_s") if key in changes}
    return getattr(presets, name)(groups_per_step=groups_per_step, **extra, **settings_of(name, **changes))


def num_admissions(buffer):
    count = 0
    while count < 1000 and buffer.admit(wait=False) is not None:
        count += 1
    return count


@pytest.mark.parametrize("name", ["bounded", "versioned", "group"])
def test_the_keys_of_the_config_are_the_arguments_of_the_preset(name):
    assert set(settings_of(name)) == set(inspect.signature(getattr(presets, name)).parameters) - GIVEN_BY_THE_RUN


@pytest.mark.parametrize("name", ["bounded", "versioned", "group"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_capacity_below_a_batch_is_refused_as_a_deadlock(name, synchronous):
    with pytest.raises(
        ValueError, match=r"buffer.capacity must be >= trainer.groups_per_step \(4\), got 3: .*for ever"
    ):
        make(name, capacity=3, synchronous=synchronous)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("bounded", "when_full", "drop", "buffer.when_full must be block or evict_oldest, got drop"),
        ("versioned", "max_staleness", -1, "buffer.max_staleness must be >= 0, got -1"),
        ("versioned", "staleness_policy", "free", "buffer.staleness_policy must be pace or evict, got free"),
        ("group", "max_filtered_in_a_row", 0, "buffer.max_filtered_in_a_row must be >= 1, got 0"),
        ("group", "groups_per_step", 0, "trainer.groups_per_step must be >= 1, got 0"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_config_key(name, key, value, message):
    # the wrapped function: shape checks in tests refuse wrong literals before ours do
    preset = inspect.unwrap(getattr(presets, name))
    arguments = {"groups_per_step": 4, **settings_of(name), key: value}
    with pytest.raises(ValueError, match=message):
        preset(**arguments)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("versioned", {"max_staleness": 0}, 4),
        ("versioned", {"max_staleness": 2}, 12),
        ("versioned", {"max_staleness": 2, "capacity": 6}, 6),
        ("versioned", {"max_staleness": 0, "capacity": 6}, 4),
        ("versioned", {"max_staleness": 2, "staleness_policy": "evict"}, 16),
        ("versioned", {"max_staleness": 2, "staleness_policy": "evict", "capacity": 40}, 40),
        ("group", {"max_staleness": 1}, 8),
        ("bounded", {"capacity": 5}, 5),
        ("bounded", {"capacity": 5, "when_full": "evict_oldest"}, 1000),
    ],
)
def test_admission_stops_at_the_smaller_of_pace_and_capacity(name, changes, expected):
    assert num_admissions(make(name, **changes)) == expected


@pytest.mark.parametrize("name", ["bounded", "versioned", "group"])
def test_synchronous_admits_exactly_a_batch_for_each_version(name, group_of):
    buffer = make(name, synchronous=True)
    for version in range(1, 4):
        tickets = [buffer.admit(wait=False) for _ in range(4)]
        assert buffer.admit(wait=False) is None
        for ticket in reversed(tickets):
            buffer.put(group_of(ticket))
        assert [taken.prompt.ticket for taken in buffer.take(4)] == tickets
        buffer.advance(version)


def test_synchronous_keeps_the_filter(group_of):
    buffer = make("group", synchronous=True, groups_per_step=1)
    buffer.put(group_of(buffer.admit(wait=False), rewards=(0.5, 0.5)))
    assert buffer.report()["dropped"] == {"zero_variance": 1}


def test_the_filter_can_be_switched_off(group_of):
    buffer = make("group", filter_zero_variance=False)
    buffer.put(group_of(buffer.admit(wait=False), rewards=(0.5, 0.5)))
    assert buffer.report()["held"] == 1
