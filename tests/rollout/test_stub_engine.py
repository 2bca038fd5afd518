import pytest

from asynctensorrlhf.rollout.engines.stub import StubEngine
from asynctensorrlhf.types import GenerationRequest, WeightSnapshot
from tests.fakes import make_prompts, run_engine


def test_scripted_ids_come_out_untouched_and_in_turn():
    engine = StubEngine(script=[[258, 19], [7]], stop_token_ids=(7,), max_new_tokens=2)
    samples = run_engine(engine, make_prompts(1), num_samples=3)
    assert [samples[0, i].completion_ids.tolist() for i in range(3)] == [[258, 19], [7], [258, 19]]
    assert [samples[0, i].finish_reason for i in range(3)] == ["length", "stop", "length"]


def test_drawn_ids_depend_on_seed_group_and_index_only():
    prompts = make_prompts(4)
    together = run_engine(StubEngine(seed=1), prompts)
    alone = run_engine(StubEngine(seed=1), prompts[2:3])
    other = run_engine(StubEngine(seed=2), prompts[2:3])
    assert alone[2, 1].completion_ids.tolist() == together[2, 1].completion_ids.tolist()
    assert alone[2, 1].completion_ids.tolist() != other[2, 1].completion_ids.tolist()


def test_a_straggler_takes_more_steps_and_its_tokens_carry_the_versions_they_saw():
    engine = StubEngine(script=[[3, 3]], straggler_fraction=1.0, straggler_factor=4, stop_token_ids=(0,))
    engine.add(GenerationRequest(make_prompts(1)[0], 1))
    assert [engine.step() for _ in range(4)] == [[]] * 4
    engine.load(WeightSnapshot(5, {}))
    finished = [sample for _ in range(4) for sample in engine.step()]
    assert finished[0].token_versions.tolist() == [0, 5]


def test_it_fails_at_the_step_it_is_told_to():
    engine = StubEngine(fail_at_step=2, fail_message="out of luck", script=[[1] * 9])
    engine.add(GenerationRequest(make_prompts(1)[0], 1))
    engine.step()
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
