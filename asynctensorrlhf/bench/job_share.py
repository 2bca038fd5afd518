"""The share of the loss's own arithmetic in the forward and backward pass of the default job.

Knows the default job's model, prompts and sizes from its config; does not know engines or optimizers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from asynctensorrlhf.bench.loss_times import forward_and_backward, prepared
from asynctensorrlhf.bench.timing import time_pairs
from asynctensorrlhf.composition.hydra_app import HydraApp, parse_arguments
from asynctensorrlhf.composition.sources import Sources, load_sources
from asynctensorrlhf.policy.load import load_model
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.types import LossInputs, TrainBatch


def measure(*, num_pairs: int, seed: int, device: torch.device) -> dict[str, Any]:
    """Median ms of one step's whole pass and of its loss alone, and the median share of the second, percent."""
    cfg = HydraApp(parse_arguments([])).compose([f"seed={seed}", "trainer.eval_draws=0"])
    sources = load_sources(cfg, None)
    policy, loss = _policy(cfg, sources, device), instantiate(cfg.loss)
    batch = _batch(cfg, sources, device)
    with torch.no_grad():
        inputs = _inputs(policy, batch, seed)

    def whole_pass() -> None:
        for parameter in policy.model.parameters():
            parameter.grad = None
        scores = policy.logprobs(batch)
        loss(prepared(loss, inputs, policy_logprobs=scores.logprobs, entropy=scores.entropy)).loss.backward()

    pairs = time_pairs(whole_pass, forward_and_backward(loss, inputs), num_pairs=num_pairs, device=device)
    return {
        "num_samples": batch.num_samples,
        "num_tokens": int(batch.loss_mask.sum()),
        "pass_median_ms": 1e3 * pairs.baseline_s,
        "loss_median_ms": 1e3 * pairs.other_s,
        "loss_share_percent": 100 * pairs.ratio,
    }


def _policy(cfg: DictConfig, sources: Sources, device: torch.device) -> Policy:
    model: Any = load_model(sources.model_path)
    return Policy(
        model=model.to(device),
        temperature=cfg.rollout.temperature,
        num_token_ids=sources.num_token_ids,
        share_prompt=cfg.trainer.share_prompt,
        logprob_chunk_tokens=cfg.trainer.logprob_chunk_tokens,
        autocast=nullcontext,
    )


def _batch(cfg: DictConfig, sources: Sources, device: torch.device) -> TrainBatch:
    """One step: the first prompts of the data, every sample completed with the answer and an EOS."""
    data, size = sources.data.train, cfg.rollout.group_size
    rows = [data.rows[data.row_id(draw)] for draw in range(cfg.trainer.groups_per_step)]
    answers = [[*sources.tokenizer(row.columns["answer"])["input_ids"], sources.stop_token_ids[0]] for row in rows]
    completions = [torch.tensor(answer) for answer in answers for _ in range(size)]
    lengths = torch.tensor([len(completion) for completion in completions])
    ids = torch.nn.utils.rnn.pad_sequence(completions, batch_first=True)
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    sign = torch.arange(len(completions)).remainder(2).float().mul(2).sub(1)
    tensors = {
        "prompt_ids": torch.nn.utils.rnn.pad_sequence([row.prompt_ids for row in rows], batch_first=True),
        "prompt_lengths": torch.tensor([len(row.prompt_ids) for row in rows]),
        "prompt_index": torch.arange(len(rows)).repeat_interleave(size),
        "completion_ids": ids,
        "completion_lengths": lengths,
        "behaviour_logprobs": torch.zeros(ids.shape),
        "token_versions": torch.zeros_like(ids),
        "advantages": torch.where(mask, sign[:, None], 0.0),
        "rewards": sign,
        "loss_mask": mask,
        "is_truncated": torch.zeros(len(completions), dtype=torch.bool),
    }
    return TrainBatch(**{name: tensor.to(device) for name, tensor in tensors.items()})


def _inputs(policy: Policy, batch: TrainBatch, seed: int) -> LossInputs:
    scores = policy.logprobs(batch)
    # the sampler is a version behind
    noise = torch.randn(scores.logprobs.shape, generator=torch.Generator().manual_seed(seed)).to(scores.logprobs)
    return LossInputs(
        policy_logprobs=scores.logprobs,
        behaviour_logprobs=scores.logprobs + 0.1 * noise,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        global_num_tokens=1.0,
        global_num_sequences=1.0,
        entropy=scores.entropy,
        token_versions=batch.token_versions,
        policy_version=1,
    )
