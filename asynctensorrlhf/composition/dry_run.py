"""What a run would do, told without loading a weight.

Knows sizes; does not know how anything runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM

from asynctensorrlhf.composition.sources import Sources

MIB = 1 << 20


def describe_dry_run(cfg: DictConfig, sources: Sources) -> dict[str, Any]:
    """Print the first prompt, the sizes and the memory to expect; returns them."""
    facts = {**_prompts(sources), **_sizes(cfg, sources), **_memory(cfg, sources)}
    width = max(map(len, facts))
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in facts.items()))
    return facts


def _prompts(sources: Sources) -> dict[str, Any]:
    train, heldout = sources.data.train, sources.data.heldout
    first = train.rows[train.row_id(0)]
    lengths = [len(row.prompt_ids) for row in train.rows]
    return {
        "first prompt": repr(first.text),
        "first prompt ids": first.prompt_ids.tolist(),
        "rows": len(train.rows),
        "draws": train.num_draws if train.num_draws is not None else "without end",
        "held-out draws": heldout.num_draws if heldout is not None else 0,
        "prompt tokens": f"{min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.1f}",
        **{f"data {name}": count for name, count in sources.data.counts.items()},
    }


def _sizes(cfg: DictConfig, sources: Sources) -> dict[str, Any]:
    return {
        "model": sources.model_path,
        "context": f"{sources.context_length} tokens",
        "vocabulary": f"{sources.num_token_ids} ids",
        "samples per step": cfg.trainer.groups_per_step * cfg.rollout.group_size,
        "completions at once": cfg.rollout.num_workers * cfg.rollout.max_concurrent,
        "steps": cfg.trainer.num_steps,
    }


def _memory(cfg: DictConfig, sources: Sources) -> dict[str, Any]:
    """Estimates in MiB; activations of one micro-batch come on top."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(sources.config, trust_remote_code=cfg.model.trust_remote_code)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    config = sources.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    longest = sources.longest_prompt + cfg.rollout.max_new_tokens
    slots = cfg.rollout.num_workers * cfg.rollout.max_concurrent
    kv_bytes = 2 * config.num_hidden_layers * num_heads * head_dim * longest * slots * 4
    logit_bytes = cfg.trainer.logprob_chunk_tokens * sources.num_token_ids * 4
    return {
        "parameters": f"{num_parameters:,}",
        "memory: training (weights, gradient, two moments, float32)": f"{16 * num_parameters / MIB:.0f} MiB",
        "memory: published weights and engines": f"{(2 + cfg.rollout.num_workers) * 4 * num_parameters / MIB:.0f} MiB",
        "memory: KV cache of full slots": f"{kv_bytes / MIB:.0f} MiB",
        "memory: one chunk of logits": f"{logit_bytes / MIB:.0f} MiB",
    }
