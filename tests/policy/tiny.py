"""Tiny models and batches whose padding is poisoned, and the plain way to score them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from asynctensorrlhf.types import TrainBatch

VOCABULARY = 40
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    # far from uniform, so that a wrong position or mask shows
    "initializer_range": 0.2,
}


def tiny_config(family: str, *, num_positions: int = 64) -> PretrainedConfig:
    if family == "llama":
        return LlamaConfig(**_SHAPE, max_position_embeddings=num_positions)
    if family == "qwen2":
        return Qwen2Config(**{**_SHAPE, "tie_word_embeddings": False}, max_position_embeddings=num_positions)
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=num_positions,
        initializer_range=0.2,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.3,
        bos_token_id=None,
        eos_token_id=2,
    )


def tiny_model(family: str, *, seed: int = 0, num_positions: int = 64, is_tied: bool | None = None) -> PreTrainedModel:
    """`is_tied` None: head and embedding are one weight in Llama and GPT-2, two in Qwen2."""
    config = tiny_config(family, num_positions=num_positions)
    config.tie_word_embeddings = config.tie_word_embeddings if is_tied is None else is_tied
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def tiny_batch(
    prompt_lengths: Sequence[int], completion_lengths: Sequence[Sequence[int]], *, seed: int = 0
) -> TrainBatch:
    """One group a prompt; advantages are distinct numbers, padding holds ids and numbers that must not be used."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([length for group in completion_lengths for length in group])
    num_samples, num_tokens = len(lengths), int(lengths.max()) + 2
    mask = torch.arange(num_tokens) < lengths[:, None]
    prompts = torch.tensor(prompt_lengths)
    prompt_mask = torch.arange(int(prompts.max()) + 1) < prompts[:, None]

    def draw(mask: Tensor) -> Tensor:
        return torch.randint(3, VOCABULARY, mask.shape, generator=generator).masked_fill(~mask, 10**6)

    advantages = torch.randn(num_samples, 1, generator=generator).expand(mask.shape)
    return TrainBatch(
        prompt_ids=draw(prompt_mask),
        prompt_lengths=prompts,
        prompt_index=torch.tensor([row for row, group in enumerate(completion_lengths) for _ in group]),
        completion_ids=draw(mask),
        completion_lengths=lengths,
        behaviour_logprobs=(-3 + torch.randn(mask.shape, generator=generator)).masked_fill(~mask, float("nan")),
        token_versions=mask.long(),
        advantages=advantages.masked_fill(~mask, float("nan")),
        rewards=torch.rand(num_samples, generator=generator),
        loss_mask=mask,
        is_truncated=torch.arange(num_samples) % 2 == 1,
    )


def plain_logits(model: PreTrainedModel, batch: TrainBatch, sample: int) -> Tensor:
    """Logits that predict each token of one completion: one row, no padding, no cache."""
    prompt = batch.prompt_index[sample]
    prompt_ids = batch.prompt_ids[prompt, : batch.prompt_lengths[prompt]]
    completion_ids = batch.completion_ids[sample, : batch.completion_lengths[sample]]
    logits = model(input_ids=torch.cat([prompt_ids, completion_ids])[None], use_cache=False).logits[0]
    return logits[len(prompt_ids) - 1 : -1]


def plain_logprobs(
    model: PreTrainedModel, batch: TrainBatch, *, temperature: float = 1.0, num_token_ids: int = VOCABULARY
) -> Tensor:
    """Log-probabilities of every completion token, zero on padding, sample by sample."""
    rows = []
    for sample in range(batch.num_samples):
        length = int(batch.completion_lengths[sample])
        scores = torch.log_softmax(plain_logits(model, batch, sample)[:, :num_token_ids] / temperature, dim=-1)
        logprobs = scores[torch.arange(length), batch.completion_ids[sample, :length]]
        rows.append(torch.nn.functional.pad(logprobs, (0, batch.completion_ids.shape[1] - length)))
    return torch.stack(rows)
