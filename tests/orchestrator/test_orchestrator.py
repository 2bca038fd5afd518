import threading
import traceback

import pytest
import torch

from asynctensorrlhf.buffer.presets import versioned
from asynctensorrlhf.interfaces import BufferClosed
from asynctensorrlhf.orchestrator.orchestrator import Orchestrator
from asynctensorrlhf.orchestrator.prompt_queue import PromptQueue
from asynctensorrlhf.orchestrator.version_manager import VersionManager
from asynctensorrlhf.rollout.engines.stub import StubEngine
from asynctensorrlhf.rollout.scoring import Scorer
from asynctensorrlhf.rollout.worker import RolloutWorker
from asynctensorrlhf.types import PromptRow
from asynctensorrlhf.weights.weight_store import WeightStore
from tests.fakes import FunctionReward

GROUPS_PER_STEP = 3


class Rows:
    """A source of five rows without end."""

    rows = tuple(PromptRow(torch.tensor([7, 8, index]), str(index), {}) for index in range(5))
    num_draws = None
    fingerprint = "rows"

    def row_id(self, draw):
        return draw % 5


class TakingTrainer:
    """Takes and publishes `num_steps` times; remembers what it took."""

    def __init__(self, buffer, num_steps=6, fail_at=None):
        self.buffer, self.num_steps, self.fail_at = buffer, num_steps, fail_at
        self.taken = []

    def run(self, take, publish):
        for step in range(self.num_steps):
            self.taken += take(GROUPS_PER_STEP)
            if step == self.fail_at:
                raise ArithmeticError("the update failed")
            self.buffer.advance(publish())
        return "completed"


def zero_advantage(rewards):
    return torch.zeros_like(rewards)


def make_run(*, engines, mode="async", before_sync=lambda version: None, reward=None, max_staleness=1, **trainer):
    buffer = versioned(
        groups_per_step=GROUPS_PER_STEP,
        wait_timeout_s=30.0,
        synchronous=mode == "sync",
        capacity=None,
        max_staleness=max_staleness,
        staleness_policy="pace",
    )
    store, prompts = WeightStore({}, policy_version=0), PromptQueue(Rows())
    scorer = Scorer(
        reward=FunctionReward(reward or (lambda batch: torch.zeros(len(batch.row_ids)))),
        answers={},
        advantage=zero_advantage,
    )
    workers = [
        RolloutWorker(engine=engine, buffer=buffer, prompts=prompts, weights=store, scorer=scorer, group_size=2)
        for engine in engines
    ]
    loop = TakingTrainer(buffer, **trainer)

    def sync(version):
        before_sync(version)
        store.publish({}, policy_version=version)

    orchestrator = Orchestrator(
        buffer=buffer,
        workers=workers,
        trainer=loop,
        mode=mode,
        versions=VersionManager(),
        weight_sync_fn=sync,
    )
    return orchestrator, loop, buffer


def train(orchestrator):
    with orchestrator as run:
        return run.train()


def check_nothing_is_left(orchestrator, buffer):
    assert not any(thread.is_alive() for thread in orchestrator.threads)
    counts = buffer.report()
    assert counts["drawn"] == (
        counts["trained"] + counts["held"] + counts["in_flight"] + sum(counts["dropped"].values())
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_are_trained_in_the_order_of_admission(mode):
    orchestrator, loop, buffer = make_run(engines=[StubEngine()], mode=mode)
    assert train(orchestrator) == "completed"
    assert [group.prompt.group_id for group in loop.taken] == list(range(18))
    assert buffer.report()["trained"] == 18
    check_nothing_is_left(orchestrator, buffer)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_group_is_older_than_the_bound_with_stragglers_and_four_workers(max_staleness):
    engines = [StubEngine(seed=seed, straggler_fraction=0.3, mean_delay_s=1e-4, max_concurrent=4) for seed in range(4)]
    orchestrator, loop, buffer = make_run(engines=engines, max_staleness=max_staleness, num_steps=20)
    assert train(orchestrator) == "completed"
    for place, group in enumerate(loop.taken):
        assert place // GROUPS_PER_STEP - group.min_policy_version <= max_staleness
    check_nothing_is_left(orchestrator, buffer)


def test_a_worker_that_fails_ends_the_run_with_its_own_traceback():
    engines = [StubEngine(), StubEngine(fail_at_step=3, fail_message="engine broke")]
    orchestrator, _, buffer = make_run(engines=engines, num_steps=10_000)
    with pytest.raises(RuntimeError, match="engine broke") as caught:
        train(orchestrator)
    frames = "".join(traceback.format_tb(caught.value.__traceback__))
    assert "stub.py" in frames
    assert "worker.py" in frames
    check_nothing_is_left(orchestrator, buffer)


def test_a_reward_that_fails_ends_the_run():
    def reward(batch):
        raise LookupError("no gold")

    orchestrator, _, buffer = make_run(engines=[StubEngine()], reward=reward)
    with pytest.raises(LookupError, match="no gold"):
        train(orchestrator)
    check_nothing_is_left(orchestrator, buffer)


def test_a_trainer_that_fails_lets_the_workers_go():
    orchestrator, _, buffer = make_run(engines=[StubEngine(), StubEngine()], fail_at=1)
    with pytest.raises(ArithmeticError, match="the update failed"):
        train(orchestrator)
    check_nothing_is_left(orchestrator, buffer)


def test_a_failed_publication_leaves_the_version_as_it_was():
    def sync(version):
        if version == 3:
            raise ConnectionError("no engine")

    orchestrator, loop, buffer = make_run(engines=[StubEngine()], before_sync=sync)
    with pytest.raises(ConnectionError, match="no engine"):
        train(orchestrator)
    assert orchestrator.versions.current == 2
    assert len(loop.taken) == 9
    check_nothing_is_left(orchestrator, buffer)


def test_weights_are_synced_once_a_step_with_rising_versions():
    synced = []
    orchestrator, _, _ = make_run(engines=[StubEngine()], before_sync=synced.append)
    train(orchestrator)
    assert synced == [1, 2, 3, 4, 5, 6]


def test_a_worker_waits_for_room_and_leaves_when_the_buffer_closes():
    orchestrator, _, buffer = make_run(engines=[StubEngine()])
    with orchestrator as run:
        buffer.close()
        with pytest.raises(BufferClosed):
            run.train()
    check_nothing_is_left(orchestrator, buffer)


class StuckThread:
    """Never ends; remembers how long it was waited for."""

    name = "stuck"

    def __init__(self):
        self.waited_s = []

    def start(self):
        pass

    def join(self, timeout):
        self.waited_s.append(timeout)
        threading.Event().wait(timeout)

    def is_alive(self):
        return True


def test_stuck_workers_share_one_time_limit():
    orchestrator, _, _ = make_run(engines=[StubEngine()])
    orchestrator.join_timeout_s = 0.05
    orchestrator.threads = [StuckThread(), StuckThread(), StuckThread()]
    with pytest.raises(TimeoutError, match="did not leave"), orchestrator:
        pass
    assert sum(limit for thread in orchestrator.threads for limit in thread.waited_s) < 2 * 0.05
