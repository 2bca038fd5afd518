"""Vectors of advantages: relative to a group, degenerate groups, GRPO's loss, GAE with its value loss.

Knows their names for the package's figures; does not know a formula.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from asynctensorrlhf.advantages.gae import gae
from asynctensorrlhf.advantages.group_relative import group_advantages, lacks_variance
from asynctensorrlhf.advantages.token_rewards import reference_kl, token_rewards
from asynctensorrlhf.advantages.whitening import whiten
from asynctensorrlhf.bench.vectors.compare import Results
from asynctensorrlhf.bench.vectors.fields import Vector
from asynctensorrlhf.bench.vectors.parts import average, by_kind, frame, gradient, mean_of, radii, run_loss
from asynctensorrlhf.losses.kl import KL_ESTIMATORS
from asynctensorrlhf.losses.ppo import PPO
from asynctensorrlhf.losses.surrogate import log_ratio
from asynctensorrlhf.losses.value import clipped_value_loss

# the rule of `group_advantages_degenerate`, which the others don't repeat
DEGENERATE_TOL = 1e-8
_EPS = r"/eps=([-+.\deE]+)"


def of_groups(vector: Vector) -> Results:
    """Every normalisation of one set of rewards: `kind/eps=EPS`."""
    rewards = vector.samples("rewards")
    group_ids = vector.ids("group_ids", len(rewards))
    _check_group_size(group_ids, vector.config.integer("group_size"))
    vector.config.skip_text("keys")
    is_degenerate = _lacks_variance(rewards, group_ids)
    first_of_group = (group_ids[:, None] == group_ids).int().argmax(dim=1).unique()
    shares = is_degenerate[first_of_group].to(vector.dtype).mean()
    known = {"frac_zero_std_groups": shares, "degenerate_group": is_degenerate}

    def advantages(eps: str, **options: Any) -> Tensor:
        return group_advantages(rewards, group_ids, adv_eps=float(eps), adv_tol=DEGENERATE_TOL, **options)

    kinds = {
        f"population{_EPS}": lambda eps: advantages(eps, adv_std="population"),
        f"sample{_EPS}": lambda eps: advantages(eps, adv_std="sample"),
        f"mean{_EPS}": lambda eps: advantages(eps, adv_std="none"),
        f"rloo{_EPS}": lambda eps: advantages(eps, adv_std="none", adv_baseline="leave_one_out"),
    }
    return {name: known[name] if name in known else by_kind(name, kinds) for name in vector.expected}


def of_degenerate_groups(vector: Vector) -> Results:
    """Every input is the rewards of one group."""
    adv_eps, adv_tol = vector.config.number("adv_eps"), vector.config.number("tol")

    def advantages(name: str) -> Tensor:
        rewards = vector.samples(name)
        one_group = torch.zeros(len(rewards), dtype=torch.long)
        return group_advantages(rewards, one_group, adv_std="population", adv_eps=adv_eps, adv_tol=adv_tol)

    return {name: advantages(name) for name in vector.inputs}


def grpo(vector: Vector) -> Results:
    """Group-relative advantages, the clipped surrogate, and KL to a reference in the loss."""
    rewards = vector.samples("rewards", len(vector.mask))
    advantages = group_advantages(
        rewards,
        vector.ids("group_ids", len(rewards)),
        adv_std=vector.config.choice("adv_std", {name: name for name in ("population", "sample", "none")}),
        adv_eps=vector.config.number("adv_eps"),
        adv_tol=DEGENERATE_TOL,
    )
    estimator = vector.config.choice("kl_estimator", {name: name for name in KL_ESTIMATORS})
    regulariser = {"kl_coef": vector.config.number("beta"), "kl_estimator": estimator}
    loss = PPO(**{**frame(vector), **regulariser, **radii(vector), "dual_clip": None})
    reference = vector.tokens("logp_ref")
    output, grad = run_loss(loss, vector.batch("logp_new", "logp_old", advantages=advantages, ref_logprobs=reference))
    policy = vector.tokens("logp_new")
    kl = KL_ESTIMATORS[estimator](
        log_ratio(policy, reference, vector.mask), log_ratio(policy, vector.tokens("logp_old"), vector.mask)
    )
    mean = mean_of(vector)
    return {
        "loss": output.loss,
        "grad_logp_new": grad,
        "advantages": advantages,
        "policy_loss": output.metrics["loss/policy"],
        "kl_loss": average(kl, vector.mask, mean["aggregation"], loss_scale=mean["loss_scale"]),
        "kl_token_mean": average(kl, vector.mask),
        "clip_frac": output.metrics["loss/clip_fraction"],
    }


def gae_and_value_loss(vector: Vector) -> Results:
    """KL in the reward, advantages over trained tokens, whitening, and the clipped loss of the value head."""
    mask, values = vector.mask, vector.tokens("values")
    scores = vector.samples("scores", len(mask))[:, None].expand(mask.shape)
    estimator = vector.config.choice("kl_estimator", KL_ESTIMATORS)
    distance = reference_kl(vector.tokens("logp_old"), vector.tokens("logp_ref"), mask)
    # the tokens are the policy's own
    kl = estimator(distance, torch.zeros_like(distance))
    rewards = token_rewards(scores, mask, kl, vector.config.number("kl_coef"))
    advantages, returns = gae(
        rewards, values, mask, gamma=vector.config.number("gamma"), lam=vector.config.number("lam")
    )
    leaf = vector.tokens("value_pred").requires_grad_()
    clip_eps = vector.config.optional_number("cliprange_value")
    output = clipped_value_loss(leaf, values, returns, mask, clip_eps=clip_eps, global_num_tokens=mask.sum())
    return {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "advantages_whitened": whiten(advantages, mask),
        "value_loss": output.loss,
        "grad_value_pred": gradient(output.loss, leaf),
        "value_clip_frac": output.metrics["value/clip_fraction"],
    }


def _lacks_variance(rewards: Tensor, group_ids: Int[Tensor, " sample"]) -> Bool[Tensor, " sample"]:
    # a row holds the group of its sample, the others being unscored
    own_group = torch.where(group_ids[:, None] == group_ids, rewards, torch.nan)
    return lacks_variance(own_group, DEGENERATE_TOL)


def _check_group_size(group_ids: Int[Tensor, " sample"], group_size: int) -> None:
    sizes = set(group_ids.unique(return_counts=True)[1].tolist())
    if len(sizes) == 1 and sizes != {group_size}:
        raise ValueError(f"config.group_size is {group_size}, but every group of inputs.group_ids has {sizes.pop()}")
