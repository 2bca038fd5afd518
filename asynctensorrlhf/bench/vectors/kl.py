"""Vectors of KL estimators: their values and gradients per token, and in expectation over a small softmax.

Knows which estimator a name stands for; does not know a formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctensorrlhf.bench.vectors.compare import Results
from asynctensorrlhf.bench.vectors.fields import Vector
from asynctensorrlhf.bench.vectors.parts import by_kind, gradient
from asynctensorrlhf.losses.kl import KL_ESTIMATORS
from asynctensorrlhf.losses.surrogate import log_ratio

_NAMES = {**{name: name for name in KL_ESTIMATORS}, "k3_is_unbiased": "k3_unbiased"}


def kl_estimators(vector: Vector) -> Results:
    """Per token, and the gradients that each has in expectation."""
    expectation = _Expectation(vector)
    kinds = {
        "(k[123])_in_loss": expectation.in_loss,
        "(k[123])_in_reward_detached": expectation.in_reward,
        "(k[123])_is_unbiased_offpolicy": expectation.weighted,
        "(k[123])_is_weight_detached_offpolicy": expectation.weighted_by_constants,
    }
    return {
        "tokens": {name: _per_token(vector, name) for name in vector.names("tokens")},
        # E over the policy of its log-ratio, and E over the reference of minus that
        "exact_grad_reverse_kl": expectation.gradient_of(expectation.policy * expectation.estimate("k1")),
        "exact_grad_forward_kl": expectation.gradient_of(-expectation.reference * expectation.estimate("k1")),
        "expected_gradients": {name: by_kind(name, kinds) for name in vector.names("expected_gradients")},
    }


def _per_token(vector: Vector, name: str) -> Results:
    if name not in _NAMES:
        raise ValueError(f"unknown estimator {name!r}; known are {', '.join(_NAMES)}")
    shape: dict[str, Any] = {"num_axes": 2, "dtype": vector.dtype}
    leaf = vector.inputs.tensor("logp_new", **shape).requires_grad_()
    reference, sampler = (vector.inputs.tensor(key, **shape) for key in ("logp_ref", "logp_old"))
    if not leaf.shape == reference.shape == sampler.shape:
        raise ValueError("inputs.logp_new, logp_ref and logp_old must have one shape")
    everything = torch.ones_like(leaf, dtype=torch.bool)
    values = KL_ESTIMATORS[_NAMES[name]](log_ratio(leaf, reference, everything), log_ratio(leaf, sampler, everything))
    return {"value": values.detach(), "grad": gradient(values.sum(), leaf)}


class _Expectation:
    """Gradients with respect to the logits theta of E over actions."""

    def __init__(self, vector: Vector) -> None:
        self._theta = vector.samples("theta").requires_grad_()
        self.policy = torch.softmax(self._theta, dim=0)
        self.reference = vector.samples("pi_ref", len(self._theta))
        self._sampler = vector.samples("mu", len(self._theta))
        logprobs = torch.log_softmax(self._theta, dim=0)[None]
        everything = torch.ones_like(logprobs, dtype=torch.bool)
        self._logprobs = logprobs[0]
        self._distance = log_ratio(logprobs, self.reference.log()[None], everything)[0]
        self._sampler_log_ratio = log_ratio(logprobs, self._sampler.log()[None], everything)[0]

    def estimate(self, name: str) -> Tensor:
        """Of every action."""
        return KL_ESTIMATORS[name](self._distance, self._sampler_log_ratio)

    def gradient_of(self, per_action: Tensor) -> Tensor:
        """Of the sum over actions."""
        return gradient(per_action.sum(), self._theta)

    def in_loss(self, name: str) -> Tensor:
        """The estimator itself is differentiated, on tokens of the policy."""
        return self.gradient_of(self.policy.detach() * self.estimate(name))

    def in_reward(self, name: str) -> Tensor:
        """Its value is a constant reward of the policy gradient."""
        return self.gradient_of(self.policy.detach() * self.estimate(name).detach() * self._logprobs)

    def weighted(self, name: str) -> Tensor:
        """On tokens of the sampler, with weights that carry a gradient where the estimator has them so."""
        return self.gradient_of(self._sampler * self.estimate(f"{name}_unbiased"))

    def weighted_by_constants(self, name: str) -> Tensor:
        """On tokens of the sampler, with constant weights."""
        weights = self._sampler_log_ratio.detach().exp()
        return self.gradient_of(self._sampler * weights * self.estimate(name))
