"""Updates on fixed rollouts, as one of several processes when run as a script by test_update_processes.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from asynctensorrlhf.types import TrainBatch
from tests.policy.tiny import tiny_model
from tests.trainer.presets import PRESETS, objective
from tests.trainer.updates import Bench, make_bench, stale_batch

# every preset, and what no preset switches on
OBJECTIVES: Mapping[str, tuple[str, ...]] = {
    **{preset: (preset,) for preset in PRESETS},
    "loglinear": ("ppo", "loss.proximal=loglinear", "loss/correction=geometric_tis"),
    "kl": ("grpo", "loss.kl_coef=0.1", "loss.kl_estimator=k3_unbiased", "loss.entropy_coef=0.01"),
    "gae": ("ppo", "advantage=gae", "advantage.kl_coef=0.1", "advantage.bootstrap_truncated=true"),
    "batch_std": ("ppo", "advantage.adv_std_level=batch"),
}
# with one live group the other rank has no micro-batch to run, and takes part all the same
CASES = [*((name, 4) for name in OBJECTIVES), ("m2po", 1), ("ppo", 1), ("gae", 1)]


def bench_of(name: str, **settings: Any) -> Bench:
    """An update of two epochs of two minibatches, its norm clipped as in the default job."""
    model = tiny_model("llama")
    defaults: dict[str, Any] = {"epochs_per_step": 2, "minibatches_per_step": 2, "max_grad_norm": 1.0}
    settings = {**defaults, "lr": 0.1, "diagnostics_every": 2, "reference": tiny_model("llama", seed=1), **settings}
    return make_bench(model, **objective(*OBJECTIVES[name]), **settings)


def cut_batch(num_live_groups: int = 4) -> TrainBatch:
    """Uneven lengths, masked rows and tokens, a group without variance; versions up to 3."""
    batch = stale_batch(tiny_model("llama"))
    is_live = batch.prompt_index < num_live_groups
    versions = torch.arange(batch.num_samples)[:, None].remainder(4).expand(batch.loss_mask.shape)
    advantages = torch.where(is_live[:, None], batch.advantages, 0.0)
    return replace(batch, advantages=advantages, token_versions=torch.where(batch.completion_mask, versions, 0))


def run_case(name: str, num_live_groups: int) -> dict[str, Any]:
    """Weights and reports of two steps; in the first step silent samples get no forward pass."""
    batch, bench = cut_batch(num_live_groups), bench_of(name, micro_batch_tokens=40)
    reports = [bench.update(batch, step=step, policy_version=3).metrics for step in (1, 2)]
    return {"weights": bench.weights(), "reports": reports}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save([run_case(*case) for case in CASES], sys.argv[1])
    torch.distributed.destroy_process_group()
