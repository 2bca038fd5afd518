from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from asynctensorrlhf.policy.policy import Policy
from tests.policy.tiny import plain_logits, plain_logprobs, tiny_batch, tiny_model

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
SHARING = pytest.mark.parametrize("share_prompt", [True, False])
PROMPTS, COMPLETIONS = [3, 7, 1], [[1, 5, 2], [4, 1], [6, 3, 3, 1]]


def make_policy(model: torch.nn.Module, **changes: Any) -> Policy:
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "num_token_ids": 40,
        "share_prompt": True,
        "logprob_chunk_tokens": 4096,
        "autocast": nullcontext,
    }
    return Policy(model=model, **(settings | changes))


def gradients_of(model: torch.nn.Module, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
    (weights * logprobs).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@FAMILIES
@SHARING
def test_logprobs_and_gradients_equal_a_plain_forward_of_each_sample(family: str, share_prompt: bool) -> None:
    model, batch = tiny_model(family), tiny_batch(PROMPTS, COMPLETIONS)
    policy = make_policy(model, share_prompt=share_prompt, temperature=0.7)

    expected = plain_logprobs(model, batch, temperature=0.7)
    actual = policy.logprobs(batch).logprobs

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    expected_gradients = gradients_of(model, expected)
    for name, gradient in gradients_of(model, policy.logprobs(batch).logprobs).items():
        scale = expected_gradients[name].abs().max().item()
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=0, atol=1e-5 * max(1.0, scale))


@FAMILIES
@SHARING
def test_completions_of_one_token_are_scored_from_the_prompt(family: str, share_prompt: bool) -> None:
    model, batch = tiny_model(family), tiny_batch([2, 4], [[1, 1], [1]])
    actual = make_policy(model, share_prompt=share_prompt).logprobs(batch).logprobs
    torch.testing.assert_close(actual, plain_logprobs(model, batch), rtol=0, atol=1e-5)


@SHARING
def test_sequences_may_fill_the_positions_of_the_model(share_prompt: bool) -> None:
    model = tiny_model("gpt2", num_positions=9)
    # padding a short completion behind a long prompt would need positions 9 and beyond
    batch = tiny_batch([8, 3], [[1, 1], [6, 2]])
    actual = make_policy(model, share_prompt=share_prompt).logprobs(batch).logprobs
    torch.testing.assert_close(actual, plain_logprobs(model, batch), rtol=0, atol=1e-5)


@SHARING
def test_a_long_completion_beside_short_ones_is_exact(share_prompt: bool) -> None:
    model = tiny_model("llama", num_positions=128)
    batch = tiny_batch([5, 2], [[90, 1, 70], [2, 2]])
    actual = make_policy(model, share_prompt=share_prompt).logprobs(batch).logprobs
    torch.testing.assert_close(actual, plain_logprobs(model, batch), rtol=0, atol=2e-5)


@SHARING
def test_what_padding_holds_changes_no_bit(share_prompt: bool) -> None:
    model, batch = tiny_model("gpt2"), tiny_batch(PROMPTS, COMPLETIONS)
    prompt_mask = torch.arange(batch.prompt_ids.shape[1]) < batch.prompt_lengths[:, None]
    clean = replace(
        batch,
        prompt_ids=batch.prompt_ids.where(prompt_mask, 0),
        completion_ids=batch.completion_ids.where(batch.completion_mask, 0),
    )
    policy = make_policy(model, share_prompt=share_prompt)
    scores, clean_scores = policy.logprobs(batch), policy.logprobs(clean)
    assert torch.equal(scores.logprobs, clean_scores.logprobs)
    assert torch.equal(scores.entropy, clean_scores.entropy)
    assert not scores.logprobs[~batch.completion_mask].any()


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    model, batch = tiny_model("llama"), tiny_batch([3], [[4, 2]])
    entropy = (
        make_policy(model, temperature=1.7, num_token_ids=30)
        .logprobs(replace(batch, completion_ids=batch.completion_ids % 30))
        .entropy
    )
    expected = torch.distributions.Categorical(
        logits=plain_logits(model, replace(batch, completion_ids=batch.completion_ids % 30), 0)[:, :30] / 1.7
    ).entropy()
    torch.testing.assert_close(entropy[0, :4], expected, rtol=0, atol=1e-5)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [3, 4096])
def test_entropy_carries_its_own_gradient_when_asked(chunk_tokens: int) -> None:
    model, batch = tiny_model("llama"), tiny_batch([3], [[4, 2]])
    policy = make_policy(model, temperature=1.7, logprob_chunk_tokens=chunk_tokens)
    expected = torch.zeros(())
    for sample in range(2):
        logits = plain_logits(model, batch, sample) / 1.7
        expected = expected + torch.distributions.Categorical(logits=logits).entropy().sum()
    expected_gradients = gradients_of(model, expected)
    scores = policy.logprobs(batch, entropy_gradient=True)
    assert not policy.logprobs(batch).entropy.requires_grad
    for name, gradient in gradients_of(model, scores.entropy.sum()).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-5)


def test_dropout_of_the_config_is_off_and_the_config_unchanged() -> None:
    model, batch = tiny_model("gpt2").train(), tiny_batch(PROMPTS, COMPLETIONS)
    policy = make_policy(model)
    assert torch.equal(policy.logprobs(batch).logprobs, policy.logprobs(batch).logprobs)
    assert model.config.resid_pdrop == 0.3


def test_no_gradient_is_kept_under_no_grad() -> None:
    policy, batch = make_policy(tiny_model("llama")), tiny_batch(PROMPTS, COMPLETIONS)
    with torch.no_grad():
        assert not policy.logprobs(batch).logprobs.requires_grad
    assert policy.logprobs(batch).logprobs.requires_grad


def test_logprobs_stay_float32_under_autocast() -> None:
    model, batch = tiny_model("llama"), tiny_batch(PROMPTS, COMPLETIONS)
    policy = make_policy(model, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    scores = policy.logprobs(batch)
    assert scores.logprobs.dtype == scores.entropy.dtype == torch.float32
    # bf16 compute, not float32: close, and not the same
    error = (scores.logprobs - plain_logprobs(model, batch)).abs().max()
    assert 1e-4 < error < 0.5


def test_named_tensors_hold_each_weight_once_and_no_derived_buffer() -> None:
    tied, untied = tiny_model("llama"), tiny_model("qwen2")
    names = set(make_policy(tied).named_tensors())
    assert names == {name for name, _ in tied.named_parameters()}
    assert not any("lm_head" in name or "inv_freq" in name for name in names)
    assert "lm_head.weight" in make_policy(untied).named_tensors()


def test_named_tensors_hold_persistent_buffers_and_no_gradient() -> None:
    model = tiny_model("llama")
    model.model.register_buffer("scale", torch.ones(2))
    tensors = make_policy(model).named_tensors()
    assert "model.scale" in tensors
    assert not any(tensor.requires_grad for tensor in tensors.values())
