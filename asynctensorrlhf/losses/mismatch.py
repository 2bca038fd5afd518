"""How far two sets of log-probs of the same tokens lie apart: engine against trainer, or one version against another.

Knows figures over whole tensors; does not know who computed them. No host synchronisation.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from asynctensorrlhf.losses.sequence_ratio import product_log_ratio
from asynctensorrlhf.losses.surrogate import log_ratio


def mismatch_metrics(
    policy_logprobs: Float[Tensor, "sample token"],
    behaviour_logprobs: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
) -> dict[str, Tensor]:
    """Figures of d = policy minus behaviour and w = exp(d) over the masked tokens; these tensors are all there is.

    k1 = mean(-d) and k3 = mean(w - 1 - d) estimate KL(behaviour || policy), k2 = mean(d^2 / 2) either; about 1e-3 of k3
    is usual between engines of different precision. mult_prob_error = mean exp|d|; chi2_token = mean w^2 - 1 may be
    below 0 in a sample, pearson_chi2_token = mean (w - 1)^2 can't be; ess = mean(w)^2 / mean(w^2), the effective share.
    Of sequences: w is the product of their tokens' ratios; perplexities are per sequence, then averaged, and
    log_ppl_diff is policy minus behaviour.

    Args:
        policy_logprobs: nats.
        behaviour_logprobs: nats.
        loss_mask: True on the tokens that count; others may hold anything.

    Returns:
        Scalars named `mismatch/...`, float32 or wider; at least one token must count for all of them to be finite.

    Source:
        The metrics of verl's rollout correction, NeMo-RL's token_mult_prob_error, slime, TRL.
    """
    dtype = torch.promote_types(policy_logprobs.dtype, torch.float32)
    policy = torch.where(loss_mask, policy_logprobs.detach().to(dtype), 0.0)
    behaviour = torch.where(loss_mask, behaviour_logprobs.detach().to(dtype), 0.0)
    delta = log_ratio(policy, behaviour, loss_mask)
    return _of_tokens(delta, policy, behaviour, loss_mask) | _of_sequences(delta, policy, behaviour, loss_mask)


def _of_tokens(delta: Tensor, policy: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    num_tokens = mask.sum().clamp(min=1)
    weight, size = delta.exp(), delta.abs()

    def mean(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0.0).sum() / num_tokens

    mean_weight, mean_square = mean(weight), mean(weight.square())
    return {
        "mismatch/k1": mean(-delta),
        "mismatch/k2": mean(delta.square() / 2),
        "mismatch/k3": mean(torch.expm1(delta) - delta),
        "mismatch/m2_log_ratio": mean(delta.square()),
        "mismatch/m2_ratio": mean_square,
        "mismatch/chi2_token": mean_square - 1,
        "mismatch/pearson_chi2_token": mean((weight - 1).square()),
        "mismatch/ess_token": mean_weight.square() / mean_square.clamp(min=torch.finfo(delta.dtype).tiny),
        "mismatch/weight_mean": mean_weight,
        "mismatch/weight_max": torch.where(mask, weight, -torch.inf).amax(),
        "mismatch/weight_min": torch.where(mask, weight, torch.inf).amin(),
        "mismatch/abs_log_ratio_mean": mean(size),
        "mismatch/abs_log_ratio_max": size.amax(),
        "mismatch/abs_prob_mean": mean((policy.exp() - behaviour.exp()).abs()),
        "mismatch/mult_prob_error": mean(size.exp()),
    }


def _of_sequences(delta: Tensor, policy: Tensor, behaviour: Tensor, mask: Tensor) -> dict[str, Tensor]:
    lengths = mask.sum(dim=1)
    num_sequences = (lengths > 0).sum().clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        return torch.where(lengths > 0, values, 0.0).sum() / num_sequences

    def per_token(values: Tensor) -> Tensor:
        return values.sum(dim=1) / lengths.clamp(min=1)

    total = product_log_ratio(delta, mask)
    mean_square = mean((2 * total).exp())
    difference = per_token(behaviour) - per_token(policy)
    return {
        "mismatch/chi2_sequence": mean_square - 1,
        "mismatch/ess_sequence": mean(total.exp()).square() / mean_square.clamp(min=torch.finfo(delta.dtype).tiny),
        "mismatch/policy_ppl": mean((-per_token(policy)).exp()),
        "mismatch/behaviour_ppl": mean((-per_token(behaviour)).exp()),
        "mismatch/log_ppl_diff": mean(difference),
        "mismatch/log_ppl_abs_diff": mean(difference.abs()),
        "mismatch/ppl_ratio": mean(difference.exp()),
    }
