"""The arithmetic of staleness."""

import pytest

from asynctensorrlhf.buffer.staleness import free_outstanding, is_stale, paced_outstanding, staleness


def test_staleness_counts_publications_since_the_oldest_token():
    assert staleness(7, 4) == 3
    assert staleness(7, 7) == 0


def test_a_version_of_the_future_is_an_error():
    with pytest.raises(ValueError, match="must be at most 3, the newest, got 4"):
        staleness(3, 4)


def test_a_sample_at_exactly_the_limit_is_not_stale():
    assert not is_stale(5, 3, 2)
    assert is_stale(6, 3, 2)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
@pytest.mark.parametrize("groups_per_step", [1, 3])
def test_the_pace_is_the_largest_run_ahead_that_keeps_the_limit(max_staleness, groups_per_step):
    last = paced_outstanding(max_staleness, groups_per_step) - 1
    assert last // groups_per_step == max_staleness
    assert (last + 1) // groups_per_step == max_staleness + 1


@pytest.mark.parametrize("policy_version", [0, 1, 9])
def test_the_pace_equals_the_limit_on_admissions_while_every_version_trains_a_batch(policy_version):
    max_staleness, groups_per_step, dropped = 2, 4, 5
    admission_limit = (policy_version + 1 + max_staleness) * groups_per_step + dropped
    trained = policy_version * groups_per_step
    assert admission_limit - trained - dropped == paced_outstanding(max_staleness, groups_per_step)


def test_rollouts_that_run_free_are_a_batch_ahead_of_the_pace():
    assert free_outstanding(2, 4) == paced_outstanding(2, 4) + 4
