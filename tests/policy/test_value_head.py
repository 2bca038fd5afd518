from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.policy.value_head import ValueHead
from tests.policy.tiny import tiny_batch, tiny_model

FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])
SHARING = pytest.mark.parametrize("share_prompt", [True, False])
PROMPTS, COMPLETIONS = [3, 7, 1], [[1, 5, 2], [4, 1], [6, 3, 3, 1]]


def make_head(*, hidden_size: int = 32, seed: int = 3) -> ValueHead:
    """A head that has been trained: no value is 0."""
    head = ValueHead(hidden_size, seed=seed)
    with torch.no_grad():
        head.outer.copy_(torch.linspace(-1, 1, hidden_size))
        head.outer_bias.fill_(0.25)
    return head


def make_policy(model: torch.nn.Module, head: ValueHead | None, **changes: Any) -> Policy:
    settings: dict[str, Any] = {
        "temperature": 1.7,
        "num_token_ids": 40,
        "share_prompt": True,
        "logprob_chunk_tokens": 5,
        "autocast": nullcontext,
    }
    return Policy(model=model, value_head=head, **(settings | changes))


def test_a_new_head_says_0_and_can_learn() -> None:
    head, hidden = ValueHead(8, seed=0), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    values = head(hidden)
    assert not values.any()
    values.sum().backward()
    assert head.outer.grad.all()


def test_the_seed_decides_the_weights_and_the_process_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same, other = (ValueHead(8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.inner, same.inner)
    assert not torch.equal(one.inner, other.inner)


def test_values_are_float32_whatever_the_trunk_computes_in() -> None:
    head = make_head(hidden_size=8)
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    expected = torch.tanh(hidden.double() @ head.inner.double().T) @ head.outer.double() + 0.25
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)


def test_the_value_loss_never_moves_the_policy() -> None:
    model, head, batch = tiny_model("llama"), make_head(), tiny_batch(PROMPTS, COMPLETIONS)
    scores = make_policy(model, head).logprobs(batch)
    assert scores.values is not None
    scores.values.square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad.any() for parameter in head.parameters())


def test_a_head_changes_no_logprob_and_without_one_there_are_no_values() -> None:
    model, batch = tiny_model("gpt2"), tiny_batch(PROMPTS, COMPLETIONS)
    with_head, without = make_policy(model, make_head()), make_policy(model, None)
    assert torch.equal(with_head.logprobs(batch).logprobs, without.logprobs(batch).logprobs)
    assert without.logprobs(batch).values is None
    with pytest.raises(AssertionError, match="with a value head"):
        without.state_values(batch)


@FAMILIES
@SHARING
def test_values_are_those_of_the_state_before_each_token_and_after_the_last(family: str, share_prompt: bool) -> None:
    model, head, batch = tiny_model(family), make_head(), tiny_batch(PROMPTS, COMPLETIONS)
    policy = make_policy(model, head, share_prompt=share_prompt)
    values, states = policy.logprobs(batch).values, policy.state_values(batch)
    assert values is not None
    num_samples, num_tokens = batch.completion_ids.shape
    expected = torch.zeros(num_samples, num_tokens + 1)
    for sample, prompt in enumerate(batch.prompt_index.tolist()):
        length, prompt_length = int(batch.completion_lengths[sample]), int(batch.prompt_lengths[prompt])
        ids = torch.cat([batch.prompt_ids[prompt, :prompt_length], batch.completion_ids[sample, :length]])
        hidden = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        expected[sample, : length + 1] = head(hidden[prompt_length - 1 :])

    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    assert not states[expected == 0].any()
    torch.testing.assert_close(values, expected[:, :-1].where(batch.completion_mask, 0.0), rtol=0, atol=1e-5)


@SHARING
def test_the_state_after_the_last_token_needs_no_further_position(share_prompt: bool) -> None:
    model = tiny_model("gpt2", num_positions=9)
    batch = tiny_batch([8, 3], [[1, 1], [6, 2]])
    policy = make_policy(model, make_head(), share_prompt=share_prompt)
    states = policy.state_values(batch)
    assert states[torch.arange(4), batch.completion_lengths].all()


def test_what_padding_holds_changes_no_value() -> None:
    model, batch = tiny_model("llama"), tiny_batch(PROMPTS, COMPLETIONS)
    clean = replace(batch, completion_ids=batch.completion_ids.where(batch.completion_mask, 0))
    policy = make_policy(model, make_head())
    assert torch.equal(policy.state_values(batch), policy.state_values(clean))


def test_a_saved_head_says_the_same(tmp_path: Path) -> None:
    head, hidden = make_head(), torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    head.save(tmp_path)
    loaded = ValueHead(32, seed=9)
    loaded.load(tmp_path)
    assert torch.equal(loaded(hidden), head(hidden))
    assert loaded.inner.requires_grad


def test_a_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    file = tmp_path / "value_head.safetensors"
    with pytest.raises(ValueError, match=rf"{file}: no such file; the checkpoint was made without a value head"):
        ValueHead(32, seed=0).load(tmp_path)
    make_head(hidden_size=16).save(tmp_path)
    with pytest.raises(ValueError, match=rf"{file}: does not fit this value head .*size mismatch for inner"):
        ValueHead(32, seed=0).load(tmp_path)
    save_file({"inner": torch.zeros(32, 32)}, file)
    with pytest.raises(ValueError, match=rf"{file}: does not fit this value head .*Missing key.*outer"):
        ValueHead(32, seed=0).load(tmp_path)
    file.write_bytes(b"torn")
    with pytest.raises(ValueError, match=rf"{file}: does not fit this value head"):
        ValueHead(32, seed=0).load(tmp_path)


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    head = make_head()
    # its outer bias has the shape of any head's: torch would take it before it refuses the others
    ValueHead(16, seed=1).save(tmp_path)
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit"):
        head.load(tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_values_stay_float32_beside_logprobs_of_a_float64_trunk() -> None:
    model, batch = tiny_model("llama").double(), tiny_batch(PROMPTS, COMPLETIONS)
    scores = make_policy(model, make_head()).logprobs(batch)
    assert scores.values is not None
    assert (scores.logprobs.dtype, scores.values.dtype) == (torch.float64, torch.float32)
