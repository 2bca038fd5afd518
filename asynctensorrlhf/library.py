"""Public functions that join parts of rooms which do not know each other.

Knows which defaults go together in library use; does not know config or runs.
"""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.advantages.group_relative import GroupRelative
from asynctensorrlhf.losses import grpo
from asynctensorrlhf.types import LossOutput

POPULATION = GroupRelative(adv_baseline="mean", adv_std="population", adv_std_level="group", adv_eps=1e-8, adv_tol=1e-6)


def compute_grpo_loss(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    rewards: Float[Tensor, "group member"],
    loss_mask: Bool[Tensor, "sample token"],
    **options: Any,
) -> LossOutput:
    """`losses.grpo.compute_grpo_loss`, by default with advantages by the population std and eps 1e-8."""
    options = {"group_advantage": POPULATION, **options}
    return grpo.compute_grpo_loss(policy_logprobs, behaviour_logprobs, rewards, loss_mask, **options)
