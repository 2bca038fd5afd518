"""The trained side of a run: model, policy, optimizer and loss.

Knows how config becomes these objects; does not know rollouts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, get_scheduler

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.sources import Sources
from asynctensorrlhf.policy.load import check_vocabulary, load_model
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.policy.support import check_support
from asynctensorrlhf.trainer.update import Update


@dataclass(frozen=True)
class TrainingSide:
    """What is trained and what trains it.

    Attributes:
        model: float32 weights, in eval mode.
        policy: the model as a source of log-probabilities.
        update: optimizer updates of it.
        optimizer: the one that `update` steps.
        scheduler: its learning-rate schedule.
        device: where it computes.
    """

    model: PreTrainedModel
    policy: Policy
    update: Update
    optimizer: Optimizer
    scheduler: LambdaLR
    device: torch.device


def build_training_side(cfg: DictConfig, sources: Sources, device: torch.device) -> TrainingSide:
    """Load the model and put policy, optimizer and loss around it.

    Raises:
        ConfigError: the model can't be loaded, or computes what is not supported.
    """
    # Accelerate would choose a device of its own
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="bf16" if cfg.model.dtype == "bfloat16" else "no"
    )
    model = _load(cfg, sources)
    model.to(device)  # type: ignore[arg-type]
    policy = Policy(
        model=model,
        temperature=cfg.rollout.temperature,
        num_token_ids=sources.num_token_ids,
        share_prompt=cfg.trainer.share_prompt,
        logprob_chunk_tokens=cfg.trainer.logprob_chunk_tokens,
        autocast=accelerator.autocast,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=cfg.optim.lr,
        betas=tuple(cfg.optim.betas),
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
    )
    scheduler = _scheduler(cfg, optimizer)
    return TrainingSide(
        model=model,
        policy=policy,
        update=_update(cfg, accelerator, policy, optimizer, scheduler),
        optimizer=optimizer,
        scheduler=scheduler,
        device=device,
    )


def _load(cfg: DictConfig, sources: Sources) -> PreTrainedModel:
    try:
        model = load_model(sources.model_path, trust_remote_code=cfg.model.trust_remote_code)
        check_vocabulary(sources.tokenizer, model)
        check_support(model, num_positions=sources.longest_prompt + cfg.rollout.max_new_tokens)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    return model


def _scheduler(cfg: DictConfig, optimizer: Optimizer) -> LambdaLR:
    # counted in optimizer updates, never in micro-batches or processes: not prepared by Accelerate
    scheduler: LambdaLR = get_scheduler(
        "constant_with_warmup" if cfg.optim.schedule == "constant" else cfg.optim.schedule,
        optimizer,
        num_warmup_steps=cfg.optim.num_warmup_updates,
        num_training_steps=cfg.trainer.num_steps * cfg.trainer.epochs_per_step * cfg.trainer.minibatches_per_step,
    )
    return scheduler


def _update(
    cfg: DictConfig, accelerator: Accelerator, policy: Policy, optimizer: Optimizer, scheduler: LambdaLR
) -> Update:
    trainer = cfg.trainer
    return Update(
        accelerator=accelerator,
        policy=policy,
        loss=instantiate(cfg.loss),
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=cfg.optim.max_grad_norm,
        micro_batch_tokens=trainer.micro_batch_tokens,
        epochs_per_step=trainer.epochs_per_step,
        minibatches_per_step=trainer.minibatches_per_step,
        max_skipped_steps=trainer.max_skipped_steps,
        diagnostics_every=trainer.diagnostics_every,
    )
