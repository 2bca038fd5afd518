"""An `Update` on a tiny model, with the settings of the default job but for those that a test names."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from asynctensorrlhf.interfaces import Advantage, Loss
from asynctensorrlhf.policy.policy import Policy, TokenScores
from asynctensorrlhf.policy.reference import frozen
from asynctensorrlhf.policy.value_head import ValueHead
from asynctensorrlhf.trainer.kl_controller import KLController
from asynctensorrlhf.trainer.update import Update
from asynctensorrlhf.types import TrainBatch
from tests.policy.tiny import VOCABULARY, plain_logprobs, tiny_batch, tiny_model
from tests.trainer.presets import advantage_of, loss_of

# the original design's three, with radii and a threshold that bind on a stale batch
LOSSES: dict[str, Loss] = {
    "ppo": loss_of("ppo", "loss.clip_eps_high=0.3"),
    "grpo": loss_of("grpo"),
    "m2po": loss_of("m2po", "loss.ratio_sq_threshold=2.0"),
}
GROUP_RELATIVE = advantage_of("ppo")


class RecordingPolicy(Policy):
    """Notes the samples of every forward pass: how many, and whether with a gradient."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.passes: list[tuple[int, bool]] = []

    def logprobs(self, batch: TrainBatch, *, entropy_gradient: bool = False) -> TokenScores:
        self.passes.append((batch.num_samples, torch.is_grad_enabled()))
        return super().logprobs(batch, entropy_gradient=entropy_gradient)


@dataclass
class Bench:
    """The parts that an update was built of."""

    update: Update
    policy: RecordingPolicy
    model: PreTrainedModel
    optimizer: Optimizer
    scheduler: LambdaLR

    def weights(self) -> Tensor:
        """Of the policy, and of the value head behind them."""
        head = self.policy.value_head
        parameters = [*self.model.parameters(), *(head.parameters() if head is not None else ())]
        return torch.cat([parameter.detach().flatten() for parameter in parameters])


def make_bench(
    model: PreTrainedModel,
    loss: Loss,
    *,
    advantage: Advantage = GROUP_RELATIVE,
    reference: PreTrainedModel | None = None,
    kl_controller: KLController | None = None,
    optimizer: Optimizer | None = None,
    lr: float = 1.0,
    temperature: float = 1.0,
    share_prompt: bool = True,
    **changes: Any,
) -> Bench:
    common: dict[str, Any] = {
        "temperature": temperature,
        "num_token_ids": VOCABULARY,
        "share_prompt": share_prompt,
        "logprob_chunk_tokens": 4096,
        "autocast": nullcontext,
    }
    value_head = ValueHead(model.config.hidden_size, seed=0) if "values" in advantage.needs else None
    policy = RecordingPolicy(model=model, value_head=value_head, **common)
    parameters = [*model.parameters(), *(value_head.parameters() if value_head is not None else ())]
    optimizer = optimizer or SGD(parameters, lr=lr)
    scheduler = LambdaLR(optimizer, lambda update: 1.0)
    settings: dict[str, Any] = {
        "max_grad_norm": None,
        "micro_batch_tokens": 8192,
        "epochs_per_step": 1,
        "minibatches_per_step": 1,
        "max_skipped_steps": 10,
        "diagnostics_every": 1,
    }
    update = Update(
        accelerator=Accelerator(cpu=True),
        policy=policy,
        reference=None if reference is None else Policy(model=frozen(reference), **common),
        loss=loss,
        advantage=advantage,
        critic=getattr(advantage, "critic", None),
        kl_controller=kl_controller or KLController(target=None, horizon=10_000),
        optimizer=optimizer,
        scheduler=scheduler,
        **(settings | changes),
    )
    return Bench(update, policy, model, optimizer, scheduler)


def stale_batch(model: PreTrainedModel, *, spread: float = 0.5, seed: int = 0) -> TrainBatch:
    """Uneven lengths, a group without variance, a masked sample, masked tokens, ratios far from 1."""
    batch = tiny_batch([3, 7, 2, 4], [[1, 5, 2, 4], [4, 1, 3], [6, 3, 3, 1], [8, 7]], seed=seed)
    with torch.no_grad():
        noise = torch.randn(batch.loss_mask.shape, generator=torch.Generator().manual_seed(seed))
        behaviour = plain_logprobs(model, batch) + spread * noise
    advantages, loss_mask = batch.advantages.clone(), batch.loss_mask.clone()
    advantages[4:7] = advantages[4:7] * 0
    loss_mask[3] = False
    loss_mask[8, 1:] = False
    return replace(
        batch,
        behaviour_logprobs=behaviour.masked_fill(~batch.loss_mask, float("nan")),
        advantages=advantages,
        loss_mask=loss_mask,
    )


def fresh_bench(loss: str, family: str = "llama", **settings: Any) -> Bench:
    return make_bench(tiny_model(family), LOSSES[loss], **settings)
