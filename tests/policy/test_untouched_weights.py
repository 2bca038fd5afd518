"""Law: weights that nobody touched have ratio 1 and KL 0, whoever is asked and however the batch is cut."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.policy.reference import frozen_copy
from tests.policy.tiny import tiny_batch, tiny_model

MODELS = pytest.mark.parametrize(
    ("family", "is_tied"), [("llama", True), ("llama", False), ("gpt2", True), ("gpt2", False)]
)
PROMPTS, COMPLETIONS = [3, 7, 1], [[1, 5, 2], [4, 1], [6, 3, 3, 1]]


def make_policy(model: torch.nn.Module, **changes: Any) -> Policy:
    settings: dict[str, Any] = {
        "temperature": 1.7,
        "num_token_ids": 40,
        "share_prompt": True,
        "logprob_chunk_tokens": 4096,
        "autocast": nullcontext,
    }
    return Policy(model=model, **(settings | changes))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_policy_reference_and_own_weights_agree(family: str, temperature: float) -> None:
    # in train mode, as from_config leaves it: the dropout of GPT-2 would be on
    model, batch = tiny_model(family).train(), tiny_batch(PROMPTS, COMPLETIONS)
    reference_model = frozen_copy(model)
    plain = make_policy(reference_model, temperature=temperature, share_prompt=False).logprobs(batch)
    assert not plain.logprobs.requires_grad
    for share_prompt in (True, False):
        for chunk_tokens in (1, 3, 4096):
            cut = {"share_prompt": share_prompt, "logprob_chunk_tokens": chunk_tokens}
            policy = make_policy(model, temperature=temperature, **cut)
            scores = policy.logprobs(batch, entropy_gradient=True)
            reference = make_policy(reference_model, temperature=temperature, **cut).logprobs(batch)
            # cut alike, they agree in every bit; cut otherwise, to the float32 rounding of a dozen nats
            assert torch.equal(scores.logprobs, reference.logprobs)
            assert torch.equal(scores.entropy, reference.entropy)
            assert torch.equal(scores.logprobs, policy.logprobs_at(batch, policy.named_tensors()))
            torch.testing.assert_close(reference.logprobs, plain.logprobs, rtol=0, atol=5e-6)
            torch.testing.assert_close(reference.entropy, plain.entropy, rtol=0, atol=5e-6)


@MODELS
def test_logprobs_at_other_weights_are_those_of_the_other_model(family: str, is_tied: bool) -> None:
    model, other = tiny_model(family, is_tied=is_tied), tiny_model(family, seed=1, is_tied=is_tied)
    batch, policy = tiny_batch(PROMPTS, COMPLETIONS), make_policy(model)
    own = policy.logprobs(batch).logprobs
    held = {name: (id(tensor), tensor.clone()) for name, tensor in model.named_parameters()}

    # tensors that carry gradients themselves: the result does not
    actual = policy.logprobs_at(batch, dict(other.named_parameters()))

    assert not actual.requires_grad
    assert torch.equal(actual, make_policy(other).logprobs(batch).logprobs)
    assert (actual - own).abs().max() > 0.1
    assert torch.equal(policy.logprobs(batch).logprobs, own)
    for name, tensor in model.named_parameters():
        assert id(tensor) == held[name][0]
        assert torch.equal(tensor, held[name][1])
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied


def test_other_weights_do_not_disturb_a_graph_that_waits_for_its_backward_pass() -> None:
    model, batch = tiny_model("llama"), tiny_batch(PROMPTS, COMPLETIONS)
    policy, other = make_policy(model, logprob_chunk_tokens=3), make_policy(tiny_model("llama", seed=1))
    policy.logprobs(batch).logprobs.sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    waiting = policy.logprobs(batch).logprobs.sum()
    policy.logprobs_at(batch, other.named_tensors())
    waiting.backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name])


def test_weights_in_another_precision_are_widened() -> None:
    model, batch = tiny_model("llama"), tiny_batch(PROMPTS, COMPLETIONS)
    policy = make_policy(model)
    half = {name: tensor.bfloat16() for name, tensor in policy.named_tensors().items()}
    actual = policy.logprobs_at(batch, half)
    rounded = {name: tensor.float() for name, tensor in half.items()}
    assert actual.dtype == torch.float32
    assert torch.equal(actual, policy.logprobs_at(batch, rounded))


def test_weights_that_are_missing_or_unknown_are_refused_and_not_mixed() -> None:
    policy, batch = make_policy(tiny_model("llama")), tiny_batch(PROMPTS, COMPLETIONS)
    tensors = policy.named_tensors()
    fewer = {name: tensors[name] for name in list(tensors)[1:]}
    for wrong in (fewer, tensors | {"lm_head.weight": torch.zeros(40, 32)}):
        with pytest.raises(AssertionError, match="all of them"):
            policy.logprobs_at(batch, wrong)


@MODELS
def test_the_reference_stays_when_the_policy_learns(family: str, is_tied: bool) -> None:
    model, batch = tiny_model(family, is_tied=is_tied), tiny_batch(PROMPTS, COMPLETIONS)
    reference = make_policy(frozen_copy(model))
    policy = make_policy(model)
    before = reference.logprobs(batch).logprobs
    policy.logprobs(batch).logprobs.sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert torch.equal(reference.logprobs(batch).logprobs, before)
    assert not torch.equal(policy.logprobs(batch).logprobs, before)
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    head, embedding = reference.model.get_output_embeddings(), reference.model.get_input_embeddings()
    assert (head.weight is embedding.weight) == is_tied
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_other_weights_are_not_mixed_up_with_casts_that_an_autocast_keeps() -> None:
    policy, other = make_policy(tiny_model("llama")), make_policy(tiny_model("llama", seed=1))
    batch = tiny_batch(PROMPTS, COMPLETIONS)
    with torch.autocast("cpu", torch.bfloat16):
        own, expected = policy.logprobs(batch).logprobs, other.logprobs(batch).logprobs
        assert torch.equal(policy.logprobs_at(batch, other.named_tensors()), expected)
        assert torch.equal(policy.logprobs(batch).logprobs, own)
    assert (own - expected).abs().max() > 0.1
