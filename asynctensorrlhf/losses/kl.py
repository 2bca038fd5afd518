"""Estimators of KL(policy || reference) from the sampled tokens.

Knows values and gradients of each; does not know coefficients or how tokens are averaged. What each gradient is, in
expectation over tokens of the policy itself and ignoring the effect on later tokens:

    name         value           gradient                     of
    k1           d               noise of mean 0              nothing: no use as a loss
    k2           d^2 / 2         d                            KL(policy || reference), exact
    k3           e^-d - 1 + d    1 - e^-d                     KL(reference || policy), the other one
    k3_plus      as k3           d                            KL(policy || reference), exact, with the calm value
    k1_unbiased  r d             r (d + 1)                    KL(policy || reference), also on stale tokens
    k2_unbiased  sg(r) d^2 / 2   sg(r) d                      the same
    k3_unbiased  r k3            r (k3 + 1 - e^-d)            the same

with d = log policy - log reference and r = policy / sampler, which carries its gradient except in k2_unbiased.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

# a token counts at most this much in k3, and has no gradient beyond
K3_LIMIT = 10.0

Estimator = Callable[[Tensor, Tensor], Tensor]


def k1(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The log-ratio itself; may be negative."""
    return d


def k2(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Half its square."""
    return d.square() / 2


def k3(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """exp(-d) - 1 + d, never negative, at most 10."""
    return (torch.expm1(-d) + d).clamp(-K3_LIMIT, K3_LIMIT)


def k3_plus(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The value of k3 with the gradient of k2 (straight-through)."""
    half_square = k2(d, sampler_log_ratio)
    return half_square + (k3(d, sampler_log_ratio) - half_square).detach()


def k1_unbiased(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k1 weighted by policy over sampler, whose gradient counts."""
    return sampler_log_ratio.exp() * d


def k2_unbiased(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k2 weighted by policy over sampler, a constant: with its gradient it would estimate something else."""
    return sampler_log_ratio.detach().exp() * k2(d, sampler_log_ratio)


def k3_unbiased(d: Float[Tensor, "*batch"], sampler_log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """k3 weighted by policy over sampler, whose gradient counts."""
    return sampler_log_ratio.exp() * k3(d, sampler_log_ratio)


KL_ESTIMATORS: Mapping[str, Estimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_plus": k3_plus,
    "k1_unbiased": k1_unbiased,
    "k2_unbiased": k2_unbiased,
    "k3_unbiased": k3_unbiased,
}
"""Name to function of d and of the policy's log-ratio to the sampler, both masked and clamped, carrying gradients.

Source: Schulman 2020, "Approximating KL divergence"; gradients: arXiv:2506.09477, arXiv:2512.21852; k3_unbiased:
DeepSeek-V3.2, arXiv:2512.02556.
"""
