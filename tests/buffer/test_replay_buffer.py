"""Tickets, limits, order and counts of the buffer, in one thread."""

import math

import pytest
import torch

from asynctensorrlhf.buffer.presets import bounded, group, versioned
from asynctensorrlhf.interfaces import BufferClosed
from asynctensorrlhf.types import Ticket


def paced(groups_per_step=2, max_staleness=1, capacity=None, wait_timeout_s=20.0):
    return versioned(
        groups_per_step=groups_per_step,
        wait_timeout_s=wait_timeout_s,
        capacity=capacity,
        max_staleness=max_staleness,
        staleness_policy="pace",
    )


def evicting(groups_per_step=2, max_staleness=1, capacity=None):
    return versioned(
        groups_per_step=groups_per_step,
        wait_timeout_s=20.0,
        capacity=capacity,
        max_staleness=max_staleness,
        staleness_policy="evict",
    )


def filtering(groups_per_step=1, max_filtered_in_a_row=3):
    return group(
        groups_per_step=groups_per_step,
        wait_timeout_s=20.0,
        capacity=None,
        max_staleness=0,
        staleness_policy="pace",
        filter_zero_variance=True,
        max_filtered_in_a_row=max_filtered_in_a_row,
    )


def admit_all(buffer):
    tickets = []
    while (ticket := buffer.admit(wait=False)) is not None:
        tickets.append(ticket)
    return tickets


def ids(groups):
    return [taken.prompt.group_id for taken in groups]


def test_the_worked_example_of_the_docstring_holds(group_of):
    buffer = paced()
    tickets = admit_all(buffer)
    assert [ticket.ordinal for ticket in tickets] == [0, 1, 2, 3]
    for ordinal in (1, 0, 2, 3):
        buffer.put(group_of(tickets[ordinal]))
    assert ids(buffer.take(2)) == [0, 1]
    assert buffer.admit(wait=False) is None
    buffer.advance(1)
    assert ids(buffer.take(2)) == [2, 3]
    assert [ticket.policy_version for ticket in admit_all(buffer)] == [1, 1]


def test_a_straggler_holds_later_groups_back_in_admission_order(group_of):
    buffer = paced()
    tickets = admit_all(buffer)
    for ticket in tickets[1:]:
        buffer.put(group_of(ticket))
    assert not buffer.can_take(2)
    buffer.put(group_of(tickets[0]))
    assert ids(buffer.take(2)) == [0, 1]


def test_dropping_a_straggler_lets_later_groups_through_and_makes_room(group_of):
    buffer = paced()
    tickets = admit_all(buffer)
    for ticket in tickets[1:]:
        buffer.put(group_of(ticket))
    buffer.drop(tickets[0], "rollout_failed")
    assert ids(buffer.take(2)) == [1, 2]
    assert len(admit_all(buffer)) == 1
    assert buffer.report()["dropped"] == {"rollout_failed": 1}


def test_taken_groups_count_as_held_until_they_are_committed(group_of):
    buffer = paced()
    for ticket in admit_all(buffer)[:3]:
        buffer.put(group_of(ticket))
    buffer.take(2)
    assert buffer.report() == {"drawn": 4, "trained": 0, "held": 3, "in_flight": 1, "dropped": {}}
    buffer.advance(1)
    assert buffer.report() == {"drawn": 4, "trained": 2, "held": 1, "in_flight": 1, "dropped": {}}


def test_a_discarded_batch_is_counted_under_its_reason_and_keeps_the_staleness_bound(group_of):
    buffer = paced(groups_per_step=2, max_staleness=1)
    for ticket in admit_all(buffer):
        buffer.put(group_of(ticket))
    buffer.take(2)
    buffer.advance(1, "non_finite_update")
    assert buffer.report()["dropped"] == {"non_finite_update": 2}
    # the formula with version and dropped groups would admit 4 here, and the last two would be 2 versions old
    assert len(admit_all(buffer)) == 2


def test_a_version_that_does_not_rise_is_refused_and_commits_nothing(group_of):
    buffer = paced()
    buffer.put(group_of(buffer.admit(wait=False)))
    buffer.take(1)
    with pytest.raises(ValueError, match="policy_version must rise to at least 1, got 0"):
        buffer.advance(0)
    assert buffer.report()["trained"] == 0


def test_groups_may_be_discarded_without_a_new_version(group_of):
    buffer = paced()
    buffer.put(group_of(buffer.admit(wait=False)))
    buffer.limit_admissions(1)
    buffer.take(2)
    buffer.advance(0, "data_ended")
    assert buffer.report() == {"drawn": 1, "trained": 0, "held": 0, "in_flight": 0, "dropped": {"data_ended": 1}}


def test_a_put_for_a_ticket_of_another_buffer_is_an_error(group_of):
    buffer = paced()
    buffer.admit(wait=False)
    for stranger in (Ticket(7, 0), Ticket(0, 3), Ticket(-1, 0)):
        with pytest.raises(ValueError, match="this buffer never admitted it"):
            buffer.put(group_of(stranger, group_id=0))


@pytest.mark.parametrize("end", ["put", "take", "train", "drop"])
def test_a_ticket_is_handed_in_or_given_up_only_once(group_of, end):
    buffer = paced()
    ticket = buffer.admit(wait=False)
    if end == "drop":
        buffer.drop(ticket, "rollout_failed")
    else:
        buffer.put(group_of(ticket))
    if end in ("take", "train"):
        buffer.take(1)
    if end == "train":
        buffer.advance(1)
    for again in (lambda: buffer.put(group_of(ticket)), lambda: buffer.drop(ticket, "rollout_failed")):
        with pytest.raises(ValueError, match="is not in flight"):
            again()
    assert buffer.report()["drawn"] == 1


def test_a_drop_needs_a_reason():
    buffer = paced()
    with pytest.raises(ValueError, match="for a reason"):
        buffer.drop(buffer.admit(wait=False), "")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_a_non_finite_logprob_is_dropped_and_counted(group_of, bad):
    buffer = paced()
    ticket = buffer.admit(wait=False)
    spoilt = group_of(ticket)
    spoilt.samples[1].behaviour_logprobs[-1] = bad
    buffer.put(spoilt)
    assert buffer.report() == {
        "drawn": 1,
        "trained": 0,
        "held": 0,
        "in_flight": 0,
        "dropped": {"non_finite_logprobs": 1},
    }


def test_a_group_that_breaks_the_staleness_bound_is_never_handed_out(group_of):
    buffer = paced(max_staleness=1)
    buffer.load_state_dict({"policy_version": 5, "trained": 10, "dropped": {}})
    for ticket in admit_all(buffer):
        buffer.put(group_of(ticket, version=3))
    with pytest.raises(RuntimeError, match="policy version 3, older than max_staleness 1 at version 5"):
        buffer.take(2)
    assert buffer.report()["held"] == 4


def test_evict_drops_what_is_too_old_when_it_is_put(group_of):
    buffer = evicting(max_staleness=1)
    buffer.load_state_dict({"policy_version": 5, "trained": 10, "dropped": {}})
    tickets = admit_all(buffer)
    buffer.put(group_of(tickets[0], version=3))
    buffer.put(group_of(tickets[1], version=4))
    assert buffer.report()["dropped"] == {"stale": 1}
    assert [taken.min_policy_version for taken in buffer.take(1)] == [4]


def test_evict_drops_what_a_new_version_makes_too_old_and_keeps_the_limit(group_of):
    buffer = evicting(groups_per_step=2, max_staleness=1)
    tickets = admit_all(buffer)
    for ticket in tickets:
        buffer.put(group_of(ticket, version=0 if ticket.ordinal < 5 else 1))
    assert len(tickets) == 6
    for version in (1, 2):
        assert len(buffer.take(2)) == 2
        buffer.advance(version)
    assert buffer.report() == {"drawn": 6, "trained": 4, "held": 1, "in_flight": 0, "dropped": {"stale": 1}}
    assert ids(buffer.take(1)) == [5]


def test_what_evict_dropped_is_refilled(group_of):
    buffer = evicting(groups_per_step=2, max_staleness=0, capacity=2)
    buffer.load_state_dict({"policy_version": 1, "trained": 2, "dropped": {}})
    for ticket in admit_all(buffer):
        buffer.put(group_of(ticket, version=0))
    refill = admit_all(buffer)
    assert len(refill) == 2
    for ticket in refill:
        buffer.put(group_of(ticket))
    assert ids(buffer.take(2)) == [2, 3]


def test_bounded_hands_out_in_the_order_of_arrival_and_blocks_admission_when_full(group_of):
    buffer = bounded(groups_per_step=2, wait_timeout_s=20.0, capacity=3, when_full="block")
    tickets = admit_all(buffer)
    assert len(tickets) == 3
    for ordinal in (2, 0):
        buffer.put(group_of(tickets[ordinal]))
    assert ids(buffer.take(2)) == [2, 0]


def test_evict_oldest_keeps_the_last_groups_put_and_never_blocks_admission(group_of):
    buffer = bounded(groups_per_step=2, wait_timeout_s=20.0, capacity=2, when_full="evict_oldest")
    tickets = [buffer.admit(wait=False) for _ in range(5)]
    for ordinal in (3, 0, 4, 1):
        buffer.put(group_of(tickets[ordinal]))
    assert buffer.report() == {"drawn": 5, "trained": 0, "held": 2, "in_flight": 1, "dropped": {"evicted": 2}}
    assert ids(buffer.take(2)) == [4, 1]


def test_evict_oldest_never_takes_a_group_back_from_the_trainer(group_of):
    buffer = bounded(groups_per_step=2, wait_timeout_s=20.0, capacity=2, when_full="evict_oldest")
    for _ in range(2):
        buffer.put(group_of(buffer.admit(wait=False)))
    buffer.take(2)
    for _ in range(3):
        buffer.put(group_of(buffer.admit(wait=False)))
    buffer.advance(1)
    assert buffer.report() == {"drawn": 5, "trained": 2, "held": 2, "in_flight": 0, "dropped": {"evicted": 1}}


@pytest.mark.parametrize("rewards", [(0.7, 0.7), (math.nan, 0.3), (math.nan, math.nan), (1.0, 1.0 + 1e-7)])
def test_groups_without_variance_are_filtered_and_refilled_one_for_one(group_of, rewards):
    buffer = filtering(groups_per_step=1)
    ticket = buffer.admit(wait=False)
    assert buffer.admit(wait=False) is None
    buffer.put(group_of(ticket, rewards=rewards))
    assert buffer.report()["dropped"] == {"zero_variance": 1}
    buffer.put(group_of(buffer.admit(wait=False)))
    assert ids(buffer.take(1)) == [1]


def test_an_unscored_sample_does_not_hide_the_variance_of_the_others(group_of):
    buffer = filtering()
    buffer.put(group_of(buffer.admit(wait=False), rewards=(math.nan, 0.25, 1.5), lengths=(1, 2, 1)))
    assert buffer.report()["held"] == 1


def test_too_many_filtered_groups_in_a_row_are_an_error_that_names_the_key(group_of):
    buffer = filtering(max_filtered_in_a_row=3)
    for rewards in ((0.0, 0.0), (0.0, 0.0), (0.5, 1.5)):
        buffer.put(group_of(buffer.admit(wait=False), rewards=rewards))
    buffer.take(1)
    buffer.advance(1)
    for _ in range(2):
        buffer.put(group_of(buffer.admit(wait=False), rewards=(2.0, 2.0)))
    with pytest.raises(RuntimeError, match=r"buffer.max_filtered_in_a_row: 3 groups.*'zero_variance': 5"):
        buffer.put(group_of(buffer.admit(wait=False), rewards=(2.0, 2.0)))
    assert buffer.report()["drawn"] == 6


def test_when_the_data_ends_what_is_left_comes_out_and_then_nothing(group_of):
    buffer = paced(groups_per_step=3, max_staleness=1)
    buffer.limit_admissions(4)
    tickets = admit_all(buffer)
    assert len(tickets) == 4
    for ticket in tickets:
        buffer.put(group_of(ticket))
    assert ids(buffer.take(3)) == [0, 1, 2]
    buffer.advance(1)
    assert ids(buffer.take(3)) == [3]
    buffer.advance(2)
    assert buffer.take(3) == []


def test_the_end_of_the_data_waits_for_groups_in_flight_first(group_of):
    buffer = paced(groups_per_step=3)
    buffer.limit_admissions(2)
    tickets = admit_all(buffer)
    buffer.put(group_of(tickets[0]))
    assert not buffer.can_take(3)
    buffer.drop(tickets[1], "rollout_failed")
    assert ids(buffer.take(3)) == [0]


def test_a_limit_below_what_was_admitted_is_refused():
    buffer = paced()
    admit_all(buffer)
    with pytest.raises(ValueError, match="num_admissions must be >= 4, got 3"):
        buffer.limit_admissions(3)


@pytest.mark.parametrize("num_groups", [0, -1, 5])
def test_a_take_that_could_never_be_met_is_refused_at_once(num_groups):
    with pytest.raises(ValueError, match=r"num_groups must be|would wait for ever"):
        paced().take(num_groups)


def test_a_second_take_that_only_advance_could_make_room_for_is_refused_at_once(group_of):
    buffer = paced(groups_per_step=2, max_staleness=0)
    for ticket in admit_all(buffer):
        buffer.put(group_of(ticket))
    buffer.take(2)
    with pytest.raises(ValueError, match="2 groups taken before and not committed by advance"):
        buffer.take(2)


def test_after_close_only_waits_and_puts_are_refused_and_counts_go_on(group_of):
    buffer = paced()
    tickets = admit_all(buffer)
    for ticket in tickets[:2]:
        buffer.put(group_of(ticket))
    buffer.take(2)
    first = OSError("the engine died")
    buffer.close(first)
    buffer.close(ValueError("a later error"))
    for refused in (
        lambda: buffer.admit(wait=False),
        lambda: buffer.put(group_of(tickets[2])),
        lambda: buffer.take(1),
        lambda: buffer.can_take(1),
    ):
        with pytest.raises(BufferClosed) as closed:
            refused()
        assert closed.value.__cause__ is first
    buffer.drop(tickets[2], "interrupted")
    buffer.advance(1)
    assert buffer.report() == {"drawn": 4, "trained": 2, "held": 0, "in_flight": 1, "dropped": {"interrupted": 1}}


def test_a_close_without_an_error_has_no_cause():
    buffer = paced()
    buffer.close()
    with pytest.raises(BufferClosed) as closed:
        buffer.admit(wait=True)
    assert closed.value.__cause__ is None


def test_counts_go_on_after_a_resume_and_outstanding_prompts_are_drawn_again(group_of):
    buffer = paced(groups_per_step=2, max_staleness=1)
    tickets = admit_all(buffer)
    buffer.drop(tickets[1], "rollout_failed")
    for ordinal in (0, 2):
        buffer.put(group_of(tickets[ordinal]))
    buffer.take(2)
    buffer.advance(1)
    state = buffer.state_dict()
    assert state["outstanding_ordinals"] == [3]
    assert state["num_admitted"] == 4

    resumed = paced(groups_per_step=2, max_staleness=1)
    resumed.load_state_dict(state)
    assert resumed.report() == {"drawn": 3, "trained": 2, "held": 0, "in_flight": 0, "dropped": {"rollout_failed": 1}}
    again = admit_all(resumed)
    assert [ticket.policy_version for ticket in again] == [1, 1, 1, 1]
    resumed.drop(again[0], "rollout_failed")
    assert resumed.report()["dropped"] == {"rollout_failed": 2}
    assert resumed.report()["drawn"] == 7
    assert buffer.report()["dropped"] == {"rollout_failed": 1}


def test_a_resume_with_another_batch_size_neither_hangs_nor_breaks_the_bound():
    buffer = paced(groups_per_step=2, max_staleness=1)
    buffer.load_state_dict({"policy_version": 10, "trained": 320, "dropped": {}})
    assert len(admit_all(buffer)) == 4


def test_a_checkpoint_does_not_change_when_the_run_goes_on():
    buffer = paced()
    buffer.drop(buffer.admit(wait=False), "rollout_failed")
    state = buffer.state_dict()
    buffer.drop(buffer.admit(wait=False), "rollout_failed")
    assert state["dropped"] == {"rollout_failed": 1}
    assert state["outstanding_ordinals"] == []


def test_a_checkpoint_is_refused_once_tickets_were_admitted():
    buffer = paced()
    buffer.admit(wait=False)
    with pytest.raises(RuntimeError, match="before the first admission"):
        buffer.load_state_dict(buffer.state_dict())


def test_neither_memory_nor_checkpoint_grows_with_the_run(group_of):
    buffer, sizes, most = paced(groups_per_step=2, max_staleness=1), [], 0
    for version in range(1, 101):
        for ticket in admit_all(buffer):
            buffer.put(group_of(ticket))
        most = max(most, buffer.report()["held"])
        buffer.take(2)
        buffer.advance(version)
        sizes.append(len(buffer.state_dict()["outstanding_ordinals"]))
    assert most == 4
    assert set(sizes) == {2}


def test_metrics_name_counts_reasons_and_the_age_of_the_oldest_ticket(group_of):
    buffer = paced(groups_per_step=1, max_staleness=2)
    tickets = admit_all(buffer)
    buffer.drop(tickets[0], "rollout_failed")
    buffer.put(group_of(tickets[1]))
    buffer.take(1)
    buffer.advance(1)
    assert buffer.metrics() == {
        "buffer/num_drawn": 3.0,
        "buffer/num_trained": 1.0,
        "buffer/num_held": 0.0,
        "buffer/num_in_flight": 1.0,
        "buffer/num_dropped_rollout_failed": 1.0,
        "buffer/oldest_in_flight_versions": 1.0,
    }


def test_metrics_tell_how_long_the_dropped_answers_were(group_of):
    buffer = filtering()
    buffer.put(group_of(buffer.admit(wait=False), lengths=(5, 2), rewards=(0.5, 0.5)))
    buffer.put(group_of(buffer.admit(wait=False), lengths=(1, 3), rewards=(0.5, 0.5)))
    evicting_buffer = bounded(groups_per_step=1, wait_timeout_s=20.0, capacity=1, when_full="evict_oldest")
    for lengths in ((7, 1), (1, 1)):
        evicting_buffer.put(group_of(evicting_buffer.admit(wait=False), lengths=lengths))
    assert buffer.metrics()["buffer/num_dropped_tokens_zero_variance"] == 11.0
    assert evicting_buffer.metrics()["buffer/num_dropped_tokens_evicted"] == 8.0


def test_what_comes_out_is_what_went_in_whatever_the_caller_does_later(group_of):
    buffer = paced(groups_per_step=1)
    given = group_of(buffer.admit(wait=False))
    before = [sample.completion_ids.tolist() for sample in given.samples]
    buffer.put(given)
    for sample in given.samples:
        sample.completion_ids.zero_()
        sample.behaviour_logprobs.fill_(9.0)
        sample.token_versions.fill_(9)
    given.rewards.fill_(9.0)
    given.advantages.fill_(9.0)
    (taken,) = buffer.take(1)
    assert [sample.completion_ids.tolist() for sample in taken.samples] == before
    assert all((sample.behaviour_logprobs == -0.5).all() for sample in taken.samples)
    assert all((sample.token_versions == 0).all() for sample in taken.samples)
    assert taken.rewards.tolist() == [0.25, 1.5]
    assert taken.advantages.tolist() == [-0.625, 0.625]


def test_groups_put_inside_inference_mode_can_be_trained(group_of):
    buffer = paced(groups_per_step=1)
    with torch.inference_mode():
        buffer.put(group_of(buffer.admit(wait=False)))
    (taken,) = buffer.take(1)
    tensors = [taken.rewards, taken.advantages]
    tensors += [tensor for s in taken.samples for tensor in (s.completion_ids, s.behaviour_logprobs, s.token_versions)]
    assert not any(tensor.is_inference() for tensor in tensors)
    weight = torch.ones(2, requires_grad=True)
    (weight * taken.samples[0].behaviour_logprobs).sum().backward()
    assert weight.grad.tolist() == [-0.5, -0.5]
