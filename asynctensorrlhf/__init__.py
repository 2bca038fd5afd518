"""AsyncTensorRLHF: asynchronous reinforcement learning for language models, with rewards on the device.

Knows the version and where each public part lives; imports a part when it is asked for, so that
`import asynctensorrlhf` is instant.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "tensor_native_reward": "rewards.token_match",
    "gpu_reward_simple": "rewards.token_match",
    "compute_ppo_loss": "losses.ppo",
    "compute_m2po_loss": "losses.m2po",
    "compute_grpo_loss": "library",
    "BoundedReplayBuffer": "buffer",
    "VersionedReplayBuffer": "buffer",
    "GroupAwareReplayBuffer": "buffer",
    "GroupBufferEntry": "buffer",
    "ReplayBufferActor": "buffer",
    "PromptQueue": "orchestrator.prompt_queue",
    "VersionManager": "orchestrator.version_manager",
    "Orchestrator": "orchestrator.orchestrator",
    "WeightStore": "weights.weight_store",
    "RolloutWorker": "rollout.worker",
    "AsyncEngine": "rollout.async_engine",
    "HFEngine": "rollout.engines.hf",
    "StubEngine": "rollout.engines.stub",
    "TrainerWorker": "trainer.trainer",
}


def __getattr__(name: str) -> Any:
    """A public part, by its name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted((*globals(), *_HOMES))
