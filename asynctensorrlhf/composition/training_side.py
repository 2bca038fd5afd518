"""The trained side of a run: model, policy, value head, reference, optimizer and loss.

Knows how config becomes these objects; does not know rollouts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, get_scheduler

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.sources import Sources
from asynctensorrlhf.interfaces import Advantage
from asynctensorrlhf.policy.load import check_vocabulary, load_model
from asynctensorrlhf.policy.policy import Policy
from asynctensorrlhf.policy.reference import frozen, frozen_copy
from asynctensorrlhf.policy.support import check_support
from asynctensorrlhf.policy.value_head import ValueHead
from asynctensorrlhf.trainer.kl_controller import KLController
from asynctensorrlhf.trainer.update import Update


@dataclass(frozen=True)
class TrainingSide:
    """What is trained and what trains it.

    Attributes:
        model: float32 weights, in eval mode.
        policy: the model as a source of log-probabilities, with its value head when the advantage asks for one.
        advantage: of groups, for the rollout side, and of batches.
        update: optimizer updates of it.
        optimizer: the one that `update` steps.
        scheduler: its learning-rate schedule.
        device: where it computes.
    """

    model: PreTrainedModel
    policy: Policy
    advantage: Advantage
    update: Update
    optimizer: Optimizer
    scheduler: LambdaLR
    device: torch.device


def build_training_side(
    cfg: DictConfig, sources: Sources, device: torch.device, checkpoint: Path | None = None
) -> TrainingSide:
    """Load the model and put policy, optimizer and loss around it.

    Args:
        cfg: checked.
        sources: name the model.
        device: of the trainer.
        checkpoint: what a resumed run goes on from.

    Raises:
        ConfigError: the model can't be loaded, or computes what is not supported.
    """
    # Accelerate would choose a device of its own
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)
    accelerator = Accelerator(
        cpu=device.type == "cpu", mixed_precision="bf16" if cfg.model.dtype == "bfloat16" else "no"
    )
    model = _load(cfg, sources.model_path, sources)
    loss, advantage = instantiate(cfg.loss), instantiate(cfg.advantage)
    value_head = _value_head(cfg, model, checkpoint).to(device) if "values" in advantage.needs else None
    policy = _policy(cfg, sources, model.to(device), accelerator, value_head)  # type: ignore[arg-type]
    optimizer = _optimizer(cfg, policy, advantage)
    scheduler = _scheduler(cfg, optimizer)
    update = Update(
        accelerator=accelerator,
        policy=policy,
        reference=_reference(cfg, sources, policy, accelerator, needs=loss.needs | advantage.needs),
        loss=loss,
        advantage=advantage,
        critic=advantage.critic if value_head is not None else None,
        kl_controller=KLController(target=cfg.trainer.kl_target, horizon=cfg.trainer.kl_horizon),
        optimizer=optimizer,
        scheduler=scheduler,
        max_grad_norm=cfg.optim.max_grad_norm,
        micro_batch_tokens=cfg.trainer.micro_batch_tokens,
        epochs_per_step=cfg.trainer.epochs_per_step,
        minibatches_per_step=cfg.trainer.minibatches_per_step,
        max_skipped_steps=cfg.trainer.max_skipped_steps,
        diagnostics_every=cfg.trainer.diagnostics_every,
    )
    return TrainingSide(
        model=model,
        policy=policy,
        advantage=advantage,
        update=update,
        optimizer=optimizer,
        scheduler=scheduler,
        device=device,
    )


def _policy(
    cfg: DictConfig,
    sources: Sources,
    model: PreTrainedModel,
    accelerator: Accelerator,
    value_head: ValueHead | None = None,
) -> Policy:
    return Policy(
        model=model,
        temperature=cfg.rollout.temperature,
        num_token_ids=sources.num_token_ids,
        share_prompt=cfg.trainer.share_prompt,
        logprob_chunk_tokens=cfg.trainer.logprob_chunk_tokens,
        autocast=accelerator.autocast,
        value_head=value_head,
    )


def _value_head(cfg: DictConfig, model: PreTrainedModel, checkpoint: Path | None) -> ValueHead:
    """A new head, or that of the checkpoint the run goes on from."""
    head = ValueHead(model.config.get_text_config().hidden_size, seed=cfg.seed)
    if checkpoint is not None:
        try:
            head.load(checkpoint)
        except (ValueError, OSError) as error:
            raise ConfigError(f"resume={checkpoint}: {error}") from error
    return head


def _reference(
    cfg: DictConfig, sources: Sources, policy: Policy, accelerator: Accelerator, *, needs: frozenset[str]
) -> Policy | None:
    """The frozen policy that KL terms pull to: the model as the run began, also after a resume."""
    if "ref_logprobs" not in needs:
        return None
    path = sources.ref_path
    model = frozen_copy(policy.model) if path == sources.model_path else frozen(_load(cfg, path, sources))
    device = next(policy.model.parameters()).device
    return _policy(cfg, sources, model.to(device), accelerator)


def _optimizer(cfg: DictConfig, policy: Policy, advantage: Advantage) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": list(policy.model.parameters())}]
    if policy.value_head is not None:
        groups.append({"params": list(policy.value_head.parameters()), "lr": advantage.critic.lr})  # type: ignore[attr-defined]
    return torch.optim.AdamW(
        groups,
        lr=cfg.optim.lr,
        betas=tuple(cfg.optim.betas),
        eps=cfg.optim.eps,
        weight_decay=cfg.optim.weight_decay,
    )


def _load(cfg: DictConfig, path: str, sources: Sources) -> PreTrainedModel:
    try:
        model = load_model(path, trust_remote_code=cfg.model.trust_remote_code)
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
