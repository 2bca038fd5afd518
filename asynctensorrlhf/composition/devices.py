"""Which device trains, which generates, and how many threads each gets.

Knows what this machine has; does not know models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from asynctensorrlhf.composition.errors import ConfigError


@dataclass(frozen=True)
class Threads:
    """Torch threads of the trainer and of each rollout worker; the same in sync and in async mode."""

    trainer: int
    rollout: int


def trainer_device(setting: str) -> torch.device:
    """`auto`: cuda, else mps, else cpu."""
    if setting != "auto":
        return _present("trainer.device", setting)
    if torch.cuda.is_available():
        return torch.device("cuda:0")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def rollout_device(setting: str, trainer: torch.device) -> torch.device:
    """`auto`: a second GPU when there is one, else the trainer's device."""
    if setting != "auto":
        return _present("rollout.device", setting)
    if trainer.type == "cuda" and torch.cuda.device_count() > 1:
        return torch.device("cuda", (trainer.index or 0) ^ 1)
    return trainer


def thread_counts(trainer: int | str, rollout: int | str, num_workers: int) -> Threads:
    """`auto`: half of the cores for all workers together, the rest for the trainer, at least one each.

    Together never more threads than cores where that is possible: two busy thread pools on the same cores stall
    one another.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = max(1, num_cores // 2 // num_workers) if isinstance(rollout, str) else rollout
    rest = max(1, num_cores - each * num_workers) if isinstance(trainer, str) else trainer
    return Threads(trainer=rest, rollout=each)


def _present(key: str, setting: str) -> torch.device:
    device = torch.device(setting)
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if (device.index or 0) >= available.get(device.type, 0):
        names = [f"{kind} ({count})" for kind, count in available.items() if count]
        raise ConfigError(f"{key}={setting}: not on this machine, which has {', '.join(names)}; use auto")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
