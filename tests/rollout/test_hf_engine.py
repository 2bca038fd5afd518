import copy

import pytest
import torch

from asynctensorrlhf.rollout.engines.hf import HFEngine
from asynctensorrlhf.types import GenerationRequest, WeightSnapshot
from tests.fakes import EOS, VOCABULARY, make_model, make_prompt, make_prompts, plain_logprobs, run_engine, snapshot_of

FAMILIES = ("llama", "qwen2", "gpt2")


def make_engine(model, **options):
    return HFEngine(**{"model_or_path": model, "max_new_tokens": 12, "max_concurrent": 32, **options})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_behaviour_logprobs_equal_a_plain_forward_of_each_completion_alone(family, temperature):
    model = make_model(family)
    samples = run_engine(make_engine(model, temperature=temperature), make_prompts(9))
    for sample in samples.values():
        expected = plain_logprobs(model, sample, temperature)
        torch.testing.assert_close(sample.behaviour_logprobs, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_has_the_same_bits_whatever_runs_beside_it(family):
    model, prompts = make_model(family), make_prompts(12)
    crowd = run_engine(make_engine(model), prompts)
    for num_slots in (1, 5):
        few = run_engine(make_engine(model, max_concurrent=num_slots), prompts)
        assert few.keys() == crowd.keys()
        for key, sample in few.items():
            assert torch.equal(sample.completion_ids, crowd[key].completion_ids)
            assert torch.equal(sample.behaviour_logprobs, crowd[key].behaviour_logprobs)
    alone = run_engine(make_engine(model), prompts[3:4])
    assert torch.equal(alone[3, 1].behaviour_logprobs, crowd[3, 1].behaviour_logprobs)


def test_samples_of_a_group_and_runs_of_other_seeds_differ():
    model, prompts = make_model("llama"), make_prompts(4)
    first = run_engine(make_engine(model, temperature=3.0), prompts)
    again = run_engine(make_engine(model, temperature=3.0), prompts)
    other = run_engine(make_engine(model, temperature=3.0, seed=1), prompts)
    texts = [tuple(sample.completion_ids.tolist()) for sample in first.values()]
    assert len(set(texts)) == len(texts)
    assert all(torch.equal(first[key].completion_ids, again[key].completion_ids) for key in first)
    assert any(not torch.equal(first[key].completion_ids, other[key].completion_ids) for key in first)


def test_every_eos_id_ends_a_completion_and_is_kept():
    samples = run_engine(make_engine(make_model("llama"), max_new_tokens=40), make_prompts(24)).values()
    endings = {int(sample.completion_ids[-1]) for sample in samples if sample.finish_reason == "stop"}
    assert endings == set(EOS)
    for sample in samples:
        stops = torch.isin(sample.completion_ids, torch.tensor(EOS))
        assert not stops[:-1].any()
        assert stops[-1] == (sample.finish_reason == "stop")
        if sample.finish_reason == "length":
            assert len(sample.completion_ids) == 40


def test_added_stop_ids_end_completions_too():
    even = tuple(range(0, VOCABULARY, 2))
    samples = run_engine(make_engine(make_model("llama"), stop_token_ids=even), make_prompts(8))
    assert all((sample.completion_ids[:-1] % 2 == 1).all() for sample in samples.values())
    assert any(sample.finish_reason == "stop" for sample in samples.values())


def test_ids_beyond_the_tokenizer_are_never_sampled_and_take_no_probability():
    model = make_model("llama")
    samples = run_engine(make_engine(model, num_token_ids=20, temperature=2.0), make_prompts(8))
    assert max(int(sample.completion_ids.max()) for sample in samples.values()) < 20
    sample = samples[0, 0]
    ids = torch.cat([sample.prompt.prompt_ids, sample.completion_ids])[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt.prompt_ids) - 1 : -1, :20]
    expected = torch.log_softmax(logits / 2.0, -1).gather(1, sample.completion_ids[:, None]).squeeze(1)
    torch.testing.assert_close(sample.behaviour_logprobs, expected, rtol=0, atol=1e-4)


def test_greedy_takes_the_most_likely_token_whatever_the_batch():
    model, prompts = make_model("gpt2"), make_prompts(6)
    together = run_engine(make_engine(model, greedy=True), prompts, num_samples=1)
    for prompt in prompts:
        with torch.no_grad():
            first = model(input_ids=prompt.prompt_ids[None]).logits[0, -1].argmax()
        assert together[prompt.group_id, 0].completion_ids[0] == first


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_tokens_carry_the_version_whose_weights_made_them(family, kv):
    old, new = make_model(family, seed=0), make_model(family, seed=1)
    engine = make_engine(copy.deepcopy(old), kv=kv, stop_token_ids=())
    for prompt in make_prompts(6):
        engine.add(GenerationRequest(prompt, 3))
    finished = [sample for _ in range(5) for sample in engine.step()]
    engine.load(snapshot_of(new, 7))
    while not engine.is_idle():
        finished += engine.step()
    assert len(finished) == 18
    for sample in finished:
        versions = sample.token_versions.tolist()
        assert versions == [0] * 6 + [7] * 6
        by_old, by_new = plain_logprobs(old, sample, 1.0), plain_logprobs(new, sample, 1.0)
        torch.testing.assert_close(sample.behaviour_logprobs[:6], by_old[:6], rtol=0, atol=1e-4)
        is_fresh = torch.allclose(sample.behaviour_logprobs[6:], by_new[6:], atol=1e-4)
        assert is_fresh == (kv == "recompute")


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_sync_the_engine_equals_the_new_weights_also_for_a_prompt_it_has_seen(family):
    old, new = make_model(family, seed=0), make_model(family, seed=1)
    engine, prompts = make_engine(copy.deepcopy(old)), make_prompts(5)
    run_engine(engine, prompts)
    engine.load(snapshot_of(new, 1))
    after = run_engine(engine, prompts)
    fresh = run_engine(make_engine(new), prompts)
    assert all(torch.equal(after[key].behaviour_logprobs, fresh[key].behaviour_logprobs) for key in fresh)


def test_other_weights_under_the_same_version_are_not_taken_for_those_it_has():
    new = make_model("llama", seed=1)
    engine, prompts = make_engine(make_model("llama")), make_prompts(3)
    engine.load(snapshot_of(new, 0))
    after, fresh = run_engine(engine, prompts), run_engine(make_engine(new), prompts)
    assert all(torch.equal(after[key].behaviour_logprobs, fresh[key].behaviour_logprobs) for key in fresh)


def test_a_group_that_waits_over_a_swap_is_prefilled_with_the_new_weights():
    old, new = make_model("llama", seed=0), make_model("llama", seed=1)
    engine = make_engine(copy.deepcopy(old), max_concurrent=3, stop_token_ids=(), max_new_tokens=6)
    engine.add(GenerationRequest(make_prompt(0, [7, 8, 9]), 5))
    engine.step()
    engine.load(snapshot_of(new, 1))
    finished = []
    while not engine.is_idle():
        finished += engine.step()
    late = [sample for sample in finished if sample.sample_index >= 3]
    assert len(late) == 2
    for sample in late:
        assert sample.token_versions.tolist() == [1] * 6
        torch.testing.assert_close(sample.behaviour_logprobs, plain_logprobs(new, sample, 1.0), rtol=0, atol=1e-4)


def test_the_engine_is_constant_while_the_trainer_steps():
    trained = make_model("llama")
    engine, prompts = make_engine(copy.deepcopy(trained)), make_prompts(4)
    before = run_engine(engine, prompts)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1)
    after = run_engine(engine, prompts)
    assert all(torch.equal(before[key].behaviour_logprobs, after[key].behaviour_logprobs) for key in before)


@pytest.mark.parametrize("damage", ["missing", "prefixed", "misshapen"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(damage):
    model = make_model("llama")
    engine, prompts = make_engine(copy.deepcopy(model)), make_prompts(2)
    before = run_engine(engine, prompts)
    tensors = dict(snapshot_of(make_model("llama", seed=1), 1).tensors)
    last = list(tensors)[-1]
    if damage == "missing":
        del tensors[last]
    elif damage == "prefixed":
        tensors = {f"module.{name}": tensor for name, tensor in tensors.items()}
    else:
        tensors[last] = tensors[last][:1]
    with pytest.raises(ValueError, match="do not fit the engine"):
        engine.load(WeightSnapshot(1, tensors))
    after = run_engine(engine, prompts)
    assert all(torch.equal(before[key].behaviour_logprobs, after[key].behaviour_logprobs) for key in before)


def test_weights_of_another_dtype_are_converted():
    new = make_model("llama", seed=1)
    engine = make_engine(make_model("llama"))
    tensors = {name: tensor.double() for name, tensor in snapshot_of(new, 1).tensors.items()}
    engine.load(WeightSnapshot(1, tensors))
    sample = run_engine(engine, make_prompts(1))[0, 0]
    torch.testing.assert_close(sample.behaviour_logprobs, plain_logprobs(new, sample, 1.0), rtol=0, atol=1e-4)


def test_bfloat16_engine_follows_a_tied_embedding_in_its_head():
    new = make_model("llama", seed=1)
    engine = make_engine(make_model("llama"), dtype="bfloat16")
    engine.load(snapshot_of(new, 1))
    sample = run_engine(engine, make_prompts(1))[0, 0]
    expected = plain_logprobs(new, sample, 1.0)
    assert (sample.behaviour_logprobs - expected).abs().mean() < 0.3
    assert sample.behaviour_logprobs.dtype == torch.float32


def test_bfloat16_engine_computes_what_autocast_of_float32_weights_computes():
    model = make_model("llama")
    sample = run_engine(make_engine(copy.deepcopy(model), dtype="bfloat16"), make_prompts(1))[0, 0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain_logprobs(model, sample, 1.0)
    torch.testing.assert_close(sample.behaviour_logprobs, expected, rtol=0, atol=2e-2)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused():
    engine = make_engine(make_model("llama"))
    engine.add(GenerationRequest(make_prompt(0, [7] * 116), 1))
    with pytest.raises(ValueError, match=r"prompt of 117 tokens .* context of 128"):
        engine.add(GenerationRequest(make_prompt(1, [7] * 117), 1))


def test_free_slots_are_counted_against_waiting_samples():
    engine = make_engine(make_model("llama"), max_concurrent=4)
    assert engine.is_idle()
    engine.add(GenerationRequest(make_prompt(0, [7, 8]), 3))
    assert engine.has_room()
    engine.add(GenerationRequest(make_prompt(1, [7, 8]), 3))
    assert not engine.has_room()


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match=r"rollout.temperature must be > 0"):
        make_engine(make_model("llama"), temperature=0.0)


def test_tensors_that_leave_the_engine_are_no_inference_tensors():
    sample = run_engine(make_engine(make_model("llama")), make_prompts(1))[0, 0]
    assert not sample.completion_ids.is_inference()
    assert not sample.behaviour_logprobs.is_inference()
    assert not sample.behaviour_logprobs.requires_grad
