"""Updates on fixed rollouts, as one of several processes when run as a script by test_update_processes.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from tests.policy.tiny import tiny_model
from tests.trainer.updates import fresh_bench, stale_batch

# With one live group the other rank has no micro-batch to run, and takes part all the same.
CASES = [("grpo", 4), ("m2po", 4), ("m2po", 1), ("ppo", 1)]


def run_case(loss: str, num_live_groups: int) -> dict[str, Any]:
    """Weights and reports of two steps of two epochs; in the first step silent samples get no forward pass."""
    batch = stale_batch(tiny_model("llama"))
    is_live = batch.prompt_index < num_live_groups
    batch = replace(batch, advantages=torch.where(is_live[:, None], batch.advantages, 0.0))
    bench = fresh_bench(loss, micro_batch_tokens=40, epochs_per_step=2, max_grad_norm=0.5, diagnostics_every=2)
    reports = [bench.update(batch, step=step).metrics for step in (1, 2)]
    return {"weights": bench.weights(), "reports": reports}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save([run_case(*case) for case in CASES], sys.argv[1])
    torch.distributed.destroy_process_group()
