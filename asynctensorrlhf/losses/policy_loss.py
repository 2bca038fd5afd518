"""The frame of every policy loss: three stages, one mean.

Knows their order; does not know a trust region from another: each is a class of its own with one method.

    proximal policy       what the ratio is measured against          PROXIMAL_POLICIES
    behaviour correction  constant weights, proximal over sampler     correction.Correction
    trust region          per-token loss of policy over proximal      PolicyLoss.surrogate
    mean                  over the whole optimizer batch              aggregation.aggregate
    and, when asked for:  KL to a reference, entropy                  kl.KL_ESTIMATORS
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.aggregation import aggregate, at_least_one, check_aggregation, count_tokens_and_sequences
from asynctensorrlhf.losses.correction import Correction, NoCorrection, Weights
from asynctensorrlhf.losses.diagnostics import ratio_metrics
from asynctensorrlhf.losses.kl import KL_ESTIMATORS
from asynctensorrlhf.losses.proximal import PROXIMAL_POLICIES
from asynctensorrlhf.losses.surrogate import log_ratio, masked_advantages
from asynctensorrlhf.types import BatchPlan, LossInputs, LossOutput


@dataclass(frozen=True)
class Terms:
    """What a trust region computes with; masked positions hold 0.

    Attributes:
        log_ratio: policy minus proximal log-probs, nats, clamped; carries the gradient.
        behaviour_log_ratio: policy minus behaviour, likewise.
        policy_logprobs: log pi_theta, nats; carries the gradient.
        proximal_logprobs: of the proximal policy, nats.
        advantages: reward units, detached.
        loss_mask: True on the tokens that are trained.
        entropy: of each token's distribution, nats, detached; None when nobody measured it.
        global_num_tokens: trained tokens of the optimizer batch.
        plan: what the loss decided over the whole optimizer batch; None for a loss that decides nothing.
    """

    log_ratio: Float[Tensor, "sample token"]
    behaviour_log_ratio: Float[Tensor, "sample token"]
    policy_logprobs: Float[Tensor, "sample token"]
    proximal_logprobs: Float[Tensor, "sample token"]
    advantages: Float[Tensor, "sample token"]
    loss_mask: Bool[Tensor, "sample token"]
    entropy: Float[Tensor, "sample token"] | None
    global_num_tokens: Tensor | float
    plan: BatchPlan | None

    def fraction(self, tokens: Bool[Tensor, "sample token"]) -> Float[Tensor, ""]:
        """Share of the optimizer batch's trained tokens."""
        return (tokens & self.loss_mask).to(self.log_ratio.dtype).sum() / at_least_one(self.global_num_tokens)


@dataclass(frozen=True)
class Surrogate:
    """What a trust region makes of a micro-batch.

    Attributes:
        per_token: loss of each token; masked positions are not read.
        metrics: shares that add up; named `loss/...` only when tokens of advantage 0 add nothing to them.
        num_tokens: what a mean over tokens divides by; None: every trained token of the optimizer batch.
    """

    per_token: Float[Tensor, "sample token"]
    metrics: Mapping[str, Tensor]
    num_tokens: Tensor | float | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """A policy loss without its trust region, which subclasses add as `surrogate`.

    Per token: loss = weight(proximal / behaviour) x surrogate(policy / proximal) + kl_coef x KL - entropy_coef x H.
    The denominators are those of the whole optimizer batch, rejected and clipped tokens included.

    Attributes:
        proximal: `rollout`, the sampler itself; `recompute`, the weights at the start of the step; `loglinear`, a
            guess between sampler and policy from their versions (A-3PO).
        correction: weights for the gap between sampler and proximal policy.
        aggregation: how per-token losses become one, a key of `aggregation.AGGREGATIONS`.
        sequences: which sequences a mean over sequences counts: `trained` (with a trained token) or `all`.
        loss_scale: constant divisor of `seq_mean_token_sum_norm`, tokens; None with every other mode.
        kl_coef: weight of KL(policy || reference), >= 0; 0 loads no reference.
        kl_estimator: a key of `kl.KL_ESTIMATORS`.
        entropy_coef: weight of the entropy, which is maximised; 0 computes no gradient of it.
    """

    proximal: str
    correction: Correction
    aggregation: str
    sequences: str
    loss_scale: int | float | None
    kl_coef: float
    kl_estimator: str
    entropy_coef: float

    own_needs: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_aggregation(aggregation=self.aggregation, sequences=self.sequences, loss_scale=self.loss_scale)
        for key, value, allowed in (
            ("proximal", self.proximal, PROXIMAL_POLICIES),
            ("kl_estimator", self.kl_estimator, KL_ESTIMATORS),
        ):
            if value not in allowed:
                raise ValueError(f"loss.{key} must be one of {', '.join(allowed)}, got {value!r}")
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"loss.kl_coef must be >= 0 and finite, got {self.kl_coef}")
        if not math.isfinite(self.entropy_coef):
            raise ValueError(f"loss.entropy_coef must be finite, got {self.entropy_coef}")
        if self.proximal == "rollout" and self.correction.is_active:
            raise ValueError(
                "loss.correction corrects twice with loss.proximal=rollout: the ratio is policy over sampler already; "
                "use loss.proximal=recompute or loglinear, or loss/correction=none"
            )

    @property
    def needs(self) -> frozenset[str]:
        """The optional inputs that this composition reads."""
        optional = {
            "proximal_logprobs": self.proximal == "recompute",
            "ref_logprobs": self.kl_coef > 0,
            "entropy": self.entropy_coef != 0,
        }
        return self.own_needs | {name for name, is_read in optional.items() if is_read}

    @property
    def acts_without_advantage(self) -> bool:
        """Whether a token of advantage 0 has a gradient: KL and entropy don't ask for one."""
        return self.kl_coef > 0 or self.entropy_coef != 0

    @abstractmethod
    def surrogate(self, terms: Terms) -> Surrogate:
        """The trust region's loss of each token."""

    def decide(self, terms: Terms) -> BatchPlan:
        """What the trust region decides over the whole optimizer batch; called when `own_needs` holds `plan`."""
        return BatchPlan(terms.loss_mask, terms.loss_mask.sum())

    def plan(self, inputs: LossInputs) -> BatchPlan:
        """`decide` on the whole optimizer batch."""
        with torch.no_grad():
            return self.decide(self._terms(inputs, None))

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the loss."""
        terms, plan = self._terms(inputs, inputs.plan), None
        if "plan" in self.own_needs and inputs.plan is None:
            with torch.no_grad():
                plan = self.decide(terms)
            terms = replace(terms, plan=plan)
        weights = self._weights(inputs, terms)
        surrogate = self.surrogate(terms)
        per_token = surrogate.per_token if weights is None else surrogate.per_token * weights.values
        policy_loss = self._mean(per_token, inputs, num_tokens=surrogate.num_tokens)
        loss, extra = self._with_regularisers(policy_loss, inputs, terms)
        sums, maxima, minima = ratio_metrics(
            terms.behaviour_log_ratio, inputs.loss_mask, global_num_tokens=inputs.global_num_tokens
        )
        metrics = {**surrogate.metrics, **extra, **sums, **_correction_metrics(weights, terms)}
        if plan is not None:
            metrics |= plan.metrics
        return LossOutput(loss, metrics, maxima, minima)

    def _terms(self, inputs: LossInputs, plan: BatchPlan | None) -> Terms:
        mask, policy = inputs.loss_mask, inputs.policy_logprobs
        proximal = PROXIMAL_POLICIES[self.proximal](inputs)
        delta = log_ratio(policy, proximal, mask)
        is_sampler = proximal is inputs.behaviour_logprobs
        return Terms(
            log_ratio=delta,
            behaviour_log_ratio=delta if is_sampler else log_ratio(policy, inputs.behaviour_logprobs, mask),
            policy_logprobs=torch.where(mask, policy.to(delta.dtype), 0.0),
            proximal_logprobs=torch.where(mask, proximal.detach().to(delta.dtype), 0.0),
            advantages=masked_advantages(inputs.advantages, mask, delta.dtype),
            loss_mask=mask,
            entropy=None if inputs.entropy is None else torch.where(mask, inputs.entropy.detach().to(delta.dtype), 0.0),
            global_num_tokens=inputs.global_num_tokens,
            plan=plan,
        )

    def _weights(self, inputs: LossInputs, terms: Terms) -> Weights | None:
        if not self.correction.is_active:
            return None
        proximal = terms.proximal_logprobs
        return self.correction(log_ratio(proximal, inputs.behaviour_logprobs, inputs.loss_mask), inputs.loss_mask)

    def _with_regularisers(
        self, policy_loss: Float[Tensor, ""], inputs: LossInputs, terms: Terms
    ) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        loss, metrics = policy_loss, {"loss/policy": policy_loss.detach()}
        if self.kl_coef > 0:
            if inputs.ref_logprobs is None:
                raise ValueError(f"loss.kl_coef={self.kl_coef} needs ref_logprobs, got none")
            distance = log_ratio(inputs.policy_logprobs, inputs.ref_logprobs, inputs.loss_mask)
            kl = self._mean(KL_ESTIMATORS[self.kl_estimator](distance, terms.behaviour_log_ratio), inputs)
            loss = loss + self.kl_coef * inputs.kl_scale * kl
            num_tokens = at_least_one(inputs.global_num_tokens)
            metrics |= {
                "kl/loss": kl.detach(),
                "kl/ref_k1": distance.detach().sum() / num_tokens,
                "kl/ref_k3": KL_ESTIMATORS["k3"](distance.detach(), distance).sum() / num_tokens,
            }
        if self.entropy_coef != 0:
            if inputs.entropy is None:
                raise ValueError(f"loss.entropy_coef={self.entropy_coef} needs entropy, got none")
            entropy = self._mean(inputs.entropy.to(policy_loss.dtype), inputs)
            loss = loss - self.entropy_coef * entropy
            metrics["entropy/loss"] = entropy.detach()
        return loss, metrics

    def _mean(
        self, per_token: Float[Tensor, "sample token"], inputs: LossInputs, num_tokens: Tensor | float | None = None
    ) -> Float[Tensor, ""]:
        return aggregate(
            per_token,
            inputs.loss_mask,
            mode=self.aggregation,
            global_num_tokens=inputs.global_num_tokens if num_tokens is None else num_tokens,
            global_num_sequences=inputs.global_num_sequences,
            loss_scale=self.loss_scale,
        )


PLAIN: Mapping[str, Any] = {
    "proximal": "rollout",
    "correction": NoCorrection(),
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "entropy_coef": 0.0,
}
"""The stages of a loss that only has a trust region: policy over sampler, no weights, no reference."""


def whole_batch(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"] | Float[Tensor, " sample"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    sequences: str = "trained",
    **others: Any,
) -> LossInputs:
    """Inputs whose denominators are their own: these tensors are the whole optimizer batch.

    Advantages of one axis hold for every token of their sample. `others` are further fields of `LossInputs`.
    """
    num_tokens, num_sequences = count_tokens_and_sequences(loss_mask, sequences)
    per_token = advantages[:, None] if advantages.ndim == 1 else advantages
    return LossInputs(
        policy_logprobs=policy_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        advantages=per_token.expand(loss_mask.shape),
        loss_mask=loss_mask,
        global_num_tokens=num_tokens,
        global_num_sequences=num_sequences,
        **others,
    )


def _correction_metrics(weights: Weights | None, terms: Terms) -> dict[str, Tensor]:
    if weights is None:
        return {}
    num_tokens = at_least_one(terms.global_num_tokens)
    return {
        "correction/weight_mean": weights.values.sum() / num_tokens,
        "correction/changed_fraction": terms.fraction(weights.changed),
    }
