"""The generating side of a run: buffer, prompts, engines, scoring, evaluation.

Knows how config becomes these objects; does not know optimizers or losses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedModel

from asynctensorrlhf.buffer.replay_buffer import ReplayBuffer
from asynctensorrlhf.composition.sources import Sources
from asynctensorrlhf.composition.training_side import TrainingSide
from asynctensorrlhf.interfaces import PromptSource, WeightReader
from asynctensorrlhf.orchestrator import stop_signals
from asynctensorrlhf.orchestrator.prompt_queue import PromptQueue
from asynctensorrlhf.rollout.complete import complete
from asynctensorrlhf.rollout.engines.hf import HFEngine
from asynctensorrlhf.rollout.scoring import Scorer, overlong_penalty
from asynctensorrlhf.rollout.worker import RolloutWorker
from asynctensorrlhf.trainer.evaluate import Evaluator
from asynctensorrlhf.types import GenerationRequest, Sample

# evaluation has a seed of its own: the same random numbers for every run and every checkpoint
EVALUATION_SEED = 1 << 32


@dataclass(frozen=True)
class RolloutSide:
    """Who generates, and what lies between them and the trainer."""

    buffer: ReplayBuffer
    prompts: PromptQueue
    workers: list[RolloutWorker]
    evaluator: Evaluator | None


def build_rollout_side(
    cfg: DictConfig,
    sources: Sources,
    training: TrainingSide,
    prompts: PromptQueue,
    weights: WeightReader,
    device: torch.device,
) -> RolloutSide:
    """Buffer, workers with an engine each, and the evaluation of the trained model."""
    buffer: ReplayBuffer = instantiate(cfg.buffer)(
        groups_per_step=cfg.trainer.groups_per_step,
        wait_timeout_s=cfg.runtime.stall_abort_s,
        synchronous=cfg.trainer.mode == "sync",
    )
    penalty = _penalty(cfg)

    def scorer(answers: Mapping[str, Tensor], on: torch.device) -> Scorer:
        columns = {name: column.to(on) for name, column in answers.items()}
        return Scorer(reward=sources.reward, answers=columns, advantage=training.advantage, penalty=penalty)

    train_scorer = scorer(sources.answers, device)
    workers = [
        RolloutWorker(
            engine=instantiate(cfg.engine)(
                model_or_path=copy.deepcopy(training.model),
                device=device,
                kv=cfg.rollout.kv,
                **_generation(cfg, sources),
            ),
            buffer=buffer,
            prompts=prompts,
            weights=weights,
            scorer=train_scorer,
            group_size=cfg.rollout.group_size,
        )
        for _ in range(cfg.rollout.num_workers)
    ]
    heldout = sources.data.heldout
    evaluator = None
    if heldout is not None:
        generation = _generation(cfg, sources) | {"seed": EVALUATION_SEED, "dtype": "float32"}
        evaluator = _evaluator(heldout, training.model, scorer(sources.heldout_answers, training.device), generation)
    return RolloutSide(buffer, prompts, workers, evaluator)


def _penalty(cfg: DictConfig) -> Callable[[Tensor], Tensor] | None:
    if cfg.trainer.overlong != "penalty":
        return None
    return partial(
        overlong_penalty, max_new_tokens=cfg.rollout.max_new_tokens, overlong_buffer=cfg.trainer.overlong_buffer
    )


def _generation(cfg: DictConfig, sources: Sources) -> dict[str, object]:
    return {
        "seed": cfg.seed,
        "max_new_tokens": cfg.rollout.max_new_tokens,
        "temperature": cfg.rollout.temperature,
        "max_concurrent": cfg.rollout.max_concurrent,
        "stop_token_ids": sources.stop_token_ids,
        "num_token_ids": sources.num_token_ids,
    }


def _evaluator(
    heldout: PromptSource, model: PreTrainedModel, scorer: Scorer, generation: dict[str, object]
) -> Evaluator:
    """Evaluation on the trained weights themselves: no copy, and only ever between two steps."""

    def sample(requests: Sequence[GenerationRequest], *, greedy: bool) -> list[Sample]:
        engine = HFEngine(model_or_path=model, greedy=greedy, **generation)  # type: ignore[arg-type]
        return complete(engine, requests, between_steps=stop_signals.check)

    def score(samples: Sequence[Sample]) -> Tensor:
        return scorer.rewards(samples)

    return Evaluator(heldout, partial(sample, greedy=False), partial(sample, greedy=True), score)
