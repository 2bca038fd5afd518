import asyncio

import pytest
import torch

from asynctensorrlhf.buffer import BoundedReplayBuffer
from asynctensorrlhf.rollout.async_engine import AsyncEngine
from asynctensorrlhf.rollout.engines.hf import HFEngine
from asynctensorrlhf.rollout.engines.stub import StubEngine
from tests.fakes import VOCABULARY, make_model

PROMPT = {"input_ids": [3, 4, 5], "gt_ids": [7, 8], "eos_token_id": 2}


def rollout(engine, *prompts):
    return asyncio.run(engine.rollout(list(prompts)))


def make_hf_engine():
    return HFEngine(model_or_path=make_model("llama"), max_new_tokens=6, max_concurrent=2)


def test_experiences_come_in_the_order_of_the_prompts_and_are_pushed():
    buffer = BoundedReplayBuffer(max_size=8)
    engine = AsyncEngine(buffer=buffer, engine=StubEngine(script=[[7, 8, 2], [9, 2]], stop_token_ids=(2,)))
    experiences = rollout(engine, PROMPT, PROMPT | {"input_ids": torch.tensor([6])})
    assert [experience.reward for experience in experiences] == [1.0, 0.0]
    assert [experience.input_ids.tolist() for experience in buffer.sample(8)] == [[3, 4, 5], [6]]


@pytest.mark.parametrize("eos_token_id", [2, [5, 2], torch.tensor(2)])
def test_nothing_is_kept_after_the_eos_of_the_prompt(eos_token_id):
    # the engine's own stop token is another one
    engine = AsyncEngine(buffer=BoundedReplayBuffer(4), engine=StubEngine(script=[[7, 8, 2, 9, 9]]))
    (experience,) = rollout(engine, PROMPT | {"eos_token_id": eos_token_id})
    assert experience.completion_ids.tolist() == [7, 8, 2]
    assert len(experience.behaviour_logprobs) == len(experience.token_versions) == 3
    assert experience.reward == 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"input_ids": [VOCABULARY]}, rf"prompt ids must be in \[0, {VOCABULARY}\)"),
        ({"input_ids": [-1]}, "prompt ids must be in"),
        ({"input_ids": [3] * 500}, "exceeds the model's context"),
        ({"input_ids": []}, "prompt 1: input_ids is empty"),
    ],
)
def test_a_bad_prompt_is_an_error_and_the_engine_goes_on(bad, message):
    engine = AsyncEngine(buffer=BoundedReplayBuffer(max_size=8), engine=make_hf_engine())
    with pytest.raises(ValueError, match=message):
        rollout(engine, PROMPT, PROMPT | bad)
    assert len(rollout(engine, PROMPT, PROMPT, PROMPT)) == 3


def test_prompts_that_are_no_list_of_complete_dicts_are_refused():
    engine = AsyncEngine(buffer=BoundedReplayBuffer(max_size=8), engine=StubEngine())
    with pytest.raises(ValueError, match="must be a list of dicts"):
        asyncio.run(engine.rollout(PROMPT))
    with pytest.raises(ValueError, match="prompt 0 lacks eos_token_id, gt_ids; it has input_ids"):
        rollout(engine, {"input_ids": [3]})


@pytest.mark.parametrize("option", ["max_new_tokens", "max_concurrent"])
def test_an_engine_without_room_is_refused(option):
    with pytest.raises(ValueError, match="must be >= 1"):
        HFEngine(model_or_path=make_model("llama"), **{option: 0})
