"""Forward and backward time of every loss that ships, on random log-probabilities.

Knows how config becomes a loss and what a loss may read; does not know a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from hydra.utils import instantiate

from asynctensorrlhf.bench.timing import time_pairs
from asynctensorrlhf.composition.hydra_app import HydraApp, parse_arguments
from asynctensorrlhf.interfaces import Loss
from asynctensorrlhf.losses.aggregation import count_tokens_and_sequences
from asynctensorrlhf.types import LossInputs

BASELINE = "ppo"


def shipped_losses() -> dict[str, Loss]:
    """Every option of `loss=` as it is configured by default, the baseline first."""
    app = HydraApp(parse_arguments([]))
    names = sorted(app.options("loss"), key=lambda name: (name != BASELINE, name))
    return {name: instantiate(app.compose([f"loss={name}"]).loss) for name in names}


def measure(
    losses: Mapping[str, Loss], *, num_samples: int, length: int, num_pairs: int, seed: int, device: torch.device
) -> dict[str, dict[str, float]]:
    """Of each loss: median ms, median ms of the baseline beside it, and the median ratio of the pairs."""
    inputs = random_inputs(num_samples=num_samples, length=length, seed=seed, device=device)
    table = {}
    for name, loss in losses.items():
        pairs = time_pairs(
            forward_and_backward(losses[BASELINE], inputs),
            forward_and_backward(loss, inputs),
            num_pairs=num_pairs,
            device=device,
        )
        table[name] = {
            "median_ms": 1e3 * pairs.other_s,
            "baseline_median_ms": 1e3 * pairs.baseline_s,
            "ratio": pairs.ratio,
        }
    return table


def forward_and_backward(loss: Loss, inputs: LossInputs) -> Callable[[], None]:
    """Everything that a step computes of a loss: denominators, plan, loss and gradient with respect to log-probs."""

    def run() -> None:
        leaves: dict[str, Any] = {"policy_logprobs": inputs.policy_logprobs.detach().requires_grad_()}
        if "entropy" in loss.needs and inputs.entropy is not None:
            leaves["entropy"] = inputs.entropy.detach().requires_grad_()
        loss(prepared(loss, inputs, **leaves)).loss.backward()

    return run


def prepared(loss: Loss, inputs: LossInputs, **changes: Any) -> LossInputs:
    """The inputs with other log-probs, the loss's denominators and its plan for the whole of them."""
    num_tokens, num_sequences = count_tokens_and_sequences(inputs.loss_mask, loss.sequences)
    counts = {"global_num_tokens": num_tokens, "global_num_sequences": num_sequences}
    whole = LossInputs(**{**vars(inputs), **counts, **changes})
    return LossInputs(**{**vars(whole), "plan": loss.plan(whole)}) if "plan" in loss.needs else whole


def random_inputs(*, num_samples: int, length: int, seed: int, device: torch.device) -> LossInputs:
    """Log-probs of a policy that has moved, advantages of both signs, and lengths from half to the whole."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_samples, length)

    def near(logprobs: torch.Tensor, spread: float) -> torch.Tensor:
        return logprobs + spread * torch.randn(shape, generator=generator)

    sampler = -3 * torch.rand(shape, generator=generator)
    proximal = near(sampler, 0.1)
    lengths = torch.randint((length + 1) // 2, length + 1, (num_samples, 1), generator=generator)
    mask = torch.arange(length) < lengths
    tensors = {
        "policy_logprobs": near(proximal, 0.2),
        "behaviour_logprobs": sampler,
        "advantages": torch.randn((num_samples, 1), generator=generator).repeat(1, length),
        "loss_mask": mask,
        "proximal_logprobs": proximal,
        "ref_logprobs": near(sampler, 0.2),
        "entropy": 2 * torch.rand(shape, generator=generator),
        "token_versions": torch.randint(5, 9, shape, generator=generator),
    }
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items()}
    return LossInputs(**moved, policy_version=9, global_num_tokens=1.0, global_num_sequences=1.0)
