"""Small models, prompts and buffers that several test files use; each is a real object, only tiny."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from asynctensorrlhf.types import GenerationRequest, Prompt, Sample, Ticket, WeightSnapshot

VOCABULARY = 60
EOS = (2, 5)


class FunctionReward:
    """A reward of a function."""

    def __init__(self, score):
        self.score = score

    def encode(self, rows, tokenizer):
        return {}

    def __call__(self, batch):
        return self.score(batch)


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A model of two layers with two EOS ids; weights large enough that its choices are sharp."""
    torch.manual_seed(seed)
    common = {"vocab_size": VOCABULARY, "eos_token_id": list(EOS), "bos_token_id": 1, "pad_token_id": 0}
    if family == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **common))
    else:
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        }
        kind = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[family]
        model = kind[0](kind[1](tie_word_embeddings=family == "llama", **sizes, **common))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model.eval()


def make_prompt(group_id: int, ids: Sequence[int]) -> Prompt:
    return Prompt(group_id, group_id, torch.tensor(ids), Ticket(group_id, 0))


def make_prompts(num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Prompts of 2 to 17 ids, none of them an EOS."""
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 18, (num_prompts,), generator=draws).tolist()
    return [
        make_prompt(group_id, torch.randint(6, VOCABULARY, (length,), generator=draws).tolist())
        for group_id, length in enumerate(lengths)
    ]


def run_engine(engine, prompts: Sequence[Prompt], num_samples: int = 2) -> dict[tuple[int, int], Sample]:
    """All samples of all prompts by (group_id, sample_index)."""
    for prompt in prompts:
        engine.add(GenerationRequest(prompt, num_samples))
    samples = {}
    while not engine.is_idle():
        for sample in engine.step():
            key = (sample.prompt.group_id, sample.sample_index)
            assert key not in samples
            samples[key] = sample
    return samples


def plain_logprobs(model: PreTrainedModel, sample: Sample, temperature: float) -> torch.Tensor:
    """Log-probabilities of a completion by one plain forward of the whole sequence alone."""
    ids = torch.cat([sample.prompt.prompt_ids, sample.completion_ids])[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    first = len(sample.prompt.prompt_ids) - 1
    return logprobs[first:-1].gather(1, sample.completion_ids[:, None]).squeeze(1)


def snapshot_of(model: PreTrainedModel, policy_version: int) -> WeightSnapshot:
    return WeightSnapshot(policy_version, {name: tensor.detach().clone() for name, tensor in model.named_parameters()})
