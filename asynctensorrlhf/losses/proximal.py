"""The proximal policy: what the trust region measures distance from.

Knows the three choices (the sampler, the weights at the start of the step, a guess between them); does not know who
computes log-probabilities.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from asynctensorrlhf.types import LossInputs


def loglinear_weight(
    token_versions: Int[Tensor, "sample token"] | Float[Tensor, "sample token"],
    current_version: int,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "sample token"]:
    """How far the proximal policy lies on the way from the sampler's version to the current one, in [0, 1].

    With v the current version and p = v - 1 the proximal one: (p - token version) / (v - token version), 0 for tokens
    of version v or later and for negative versions (not sampled). Version 4 of 10 gives 5 / 6.

    Args:
        token_versions: version that sampled each token.
        current_version: the version that the update makes.
        dtype: of the result.
    """
    behind = (current_version - token_versions).to(dtype)
    weight = ((behind - 1) / behind.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where((behind > 0) & (token_versions >= 0), weight, torch.zeros_like(weight))


def loglinear_logprobs(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    token_versions: Int[Tensor, "sample token"] | Float[Tensor, "sample token"],
    current_version: int,
) -> Float[Tensor, "sample token"]:
    """Proximal log-probs interpolated between sampler and policy, without a forward pass of their own.

    Args:
        policy_logprobs: log pi_theta, nats; detached here.
        behaviour_logprobs: log pi of the sampler, nats.
        token_versions: version that sampled each token.
        current_version: the version that the update makes: one more than that of the weights it starts from.

    Returns:
        float32, or float64 when the policy's are float64.

    Source:
        A-3PO, arXiv:2512.06547; `prox_logp_method=loglinear` of AReaL.
    """
    dtype = torch.promote_types(policy_logprobs.dtype, torch.float32)
    policy, behaviour = policy_logprobs.detach().to(dtype), behaviour_logprobs.to(dtype)
    return behaviour + loglinear_weight(token_versions, current_version, dtype) * (policy - behaviour)


def _recomputed(inputs: LossInputs) -> Tensor:
    # at the first update of a step the policy is still the proximal one: a ratio of exactly 1, and no second pass
    recomputed = inputs.proximal_logprobs
    return inputs.policy_logprobs.detach() if recomputed is None else recomputed


def _interpolated(inputs: LossInputs) -> Tensor:
    if inputs.token_versions is None or inputs.policy_version is None:
        raise ValueError("loss.proximal=loglinear needs token_versions and policy_version, got none")
    return loglinear_logprobs(
        inputs.policy_logprobs, inputs.behaviour_logprobs, inputs.token_versions, inputs.policy_version + 1
    )


PROXIMAL_POLICIES: Mapping[str, Callable[[LossInputs], Tensor]] = {
    "rollout": lambda inputs: inputs.behaviour_logprobs,
    "recompute": _recomputed,
    "loglinear": _interpolated,
}
