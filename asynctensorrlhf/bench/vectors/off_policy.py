"""Vectors of behaviour corrections, detached weights and masks for stale data.

Knows the kinds that names stand for; does not know a formula. A name may repeat the config's constants in any
spelling: `icepop_0.5_5` is an icepop, and its bounds are those of the config.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctensorrlhf.bench.vectors.compare import Results
from asynctensorrlhf.bench.vectors.fields import Fields, Vector
from asynctensorrlhf.bench.vectors.parts import TOKEN_MEAN, by_kind, frame, radii, run_loss
from asynctensorrlhf.losses.aipo import AIPO
from asynctensorrlhf.losses.correction import ImportanceCorrection
from asynctensorrlhf.losses.dppo import DPPO, total_variation_mask
from asynctensorrlhf.losses.mismatch import mismatch_metrics
from asynctensorrlhf.losses.opsm import off_policy_sequence_mask
from asynctensorrlhf.losses.policy_gradient import CISPO, TOPR, Reinforce
from asynctensorrlhf.losses.policy_loss import PLAIN, PolicyLoss
from asynctensorrlhf.losses.ppo import PPO
from asynctensorrlhf.losses.proximal import loglinear_logprobs, loglinear_weight
from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio, product_log_ratio
from asynctensorrlhf.losses.surrogate import log_ratio
from asynctensorrlhf.types import LossInputs

_NUMBER = r"[-+.\deE]+"


def _weights(
    ratio: str = "token",
    *,
    cap: float | None = None,
    accept: str | None = None,
    bounds: tuple[float | None, float | None] = (None, None),
) -> ImportanceCorrection:
    return ImportanceCorrection(ratio=ratio, cap=cap, accept=accept, accept_low=bounds[0], accept_high=bounds[1])


def _mis_range(config: Fields) -> tuple[float, float]:
    return config.number("C_min_mask"), config.number("C_max")


TIS_KINDS = {
    "token_truncate": lambda config: _weights(cap=config.number("C_max")),
    "token_mask": lambda config: _weights(accept="token", bounds=_mis_range(config)),
    "sequence_truncate": lambda config: _weights("sequence", cap=config.number("C_max")),
    "sequence_mask": lambda config: _weights("sequence", accept="sequence", bounds=_mis_range(config)),
    rf"icepop(?:_{_NUMBER}){{2}}": lambda config: _weights(accept="token", bounds=config.range("icepop_bounds")),
    rf"geo_rs(?:_{_NUMBER}){{2}}": lambda config: _weights(
        "one", accept="geometric", bounds=config.range("geometric_bounds")
    ),
    rf"seq_mask_tis(?:_{_NUMBER}){{2}}": lambda config: _weights(
        accept="geometric", bounds=config.range("geometric_bounds")
    ),
}


def tis_family(vector: Vector) -> Results:
    """Weights of the trainer's old policy over the sampler, on top of PPO."""
    rho = log_ratio(vector.tokens("logp_old"), vector.tokens("logp_rollout"), vector.mask)

    def mode(name: str) -> Results:
        correction = by_kind(name, TIS_KINDS, vector.config)
        return {**_corrected(vector, correction, "logp_old", "logp_rollout"), **_values(vector, correction, rho)}

    return {
        "modes": {name: mode(name) for name in vector.names("modes")},
        "rho_token": vector.live(rho.exp()),
        "rho_sequence": product_log_ratio(rho, vector.mask).exp(),
        "rho_geometric": geometric_log_ratio(rho, vector.mask).exp(),
    }


CAP_ACTIONS = {
    "mask": lambda cap: _weights(accept="token", bounds=(None, cap)),
    "clamp": lambda cap: _weights(cap=cap),
    "none": lambda cap: _weights(),
}


def decoupled_ppo(vector: Vector) -> Results:
    """PPO against a proximal policy, weighted by it over the sampler."""
    cap = vector.config.number("behave_imp_weight_cap")
    proximal, behaviour = vector.tokens("logp_prox"), vector.tokens("logp_behave")
    ratio = log_ratio(vector.tokens("logp_new"), proximal, vector.mask)
    capped = _loss(vector, CAP_ACTIONS["clamp"](cap))(_three_policies(vector, "logp_prox", "logp_behave"))
    return {
        "actions": {
            name: _corrected(vector, by_kind(name, CAP_ACTIONS, cap), "logp_prox", "logp_behave")
            for name in vector.names("actions")
        },
        "behave_weight": _values(vector, _weights(), log_ratio(proximal, behaviour, vector.mask))["weights"],
        "prox_ratio": vector.live(ratio.exp()),
        "clip_frac": capped.metrics["loss/clip_fraction"],
        "frac_over_cap": capped.metrics["correction/changed_fraction"],
        "behave_kl_k3": mismatch_metrics(proximal, behaviour, vector.mask)["mismatch/k3"],
    }


def _corrected(vector: Vector, correction: ImportanceCorrection, proximal: str, behaviour: str) -> dict[str, Tensor]:
    output, grad = run_loss(_loss(vector, correction), _three_policies(vector, proximal, behaviour))
    return {"loss": output.loss, "grad_logp_new": grad}


def _loss(vector: Vector, correction: ImportanceCorrection) -> PPO:
    stages = {"proximal": "recompute", "correction": correction}
    return PPO(**{**frame(vector), **stages, **radii(vector), "dual_clip": None})


def _three_policies(vector: Vector, proximal: str, behaviour: str) -> LossInputs:
    return vector.batch("logp_new", behaviour, proximal_logprobs=vector.tokens(proximal))


def _values(vector: Vector, correction: ImportanceCorrection, rho: Tensor) -> dict[str, Tensor]:
    weights = correction(rho, vector.mask)
    assert weights is not None, "an active correction has weights"
    return {"weights": vector.live(weights.values)}


def loglinear(vector: Vector) -> Results:
    """The proximal policy that is guessed from versions."""
    versions, current = vector.tokens("versions"), vector.config.integer("current_version")
    guessed = loglinear_logprobs(vector.tokens("logp_new"), vector.tokens("logp_behave"), versions, current)
    return {
        "alpha": vector.live(loglinear_weight(versions, current, vector.dtype)),
        "logp_prox": vector.live(guessed),
    }


PG_KINDS = {
    rf"reinforce_tis_C{_NUMBER}": lambda stages, config: Reinforce(
        **stages, ratio_cap=config.number("reinforce_tis_cap")
    ),
    "topr": lambda stages, config: TOPR(**stages),
    rf"cispo_eps_high_{_NUMBER}_no_low": lambda stages, config: CISPO(
        **stages, clip_eps_low=None, clip_eps_high=config.number("cispo_eps_high")
    ),
    rf"cispo_two_sided(?:_{_NUMBER}){{2}}": lambda stages, config: CISPO(
        **stages, clip_eps_low=config.number("cispo_eps_low"), clip_eps_high=config.number("cispo_eps_high")
    ),
    rf"aipo_surrogate_delta_{_NUMBER}": lambda stages, config: AIPO(**stages, ratio_cap=config.number("aipo_delta")),
}


def policy_gradients(vector: Vector) -> Results:
    """REINFORCE and its kin: constant weights, or AIPO's capped ratio."""
    return {"variants": {name: _variant(vector, name) for name in vector.names("variants")}}


def _variant(vector: Vector, name: str) -> Results:
    loss: PolicyLoss = by_kind(name, PG_KINDS, frame(vector), vector.config)
    output, grad = run_loss(loss, vector.batch("logp_new", "logp_old"))
    results = {"loss": output.loss, "grad_logp_new": grad}
    if isinstance(loss, AIPO):
        return results
    # of an advantage of +-1, the gradient of the sum is the weight; the sign decides as the vector's advantage does
    sign = torch.where(vector.tokens("advantages") > 0, 1.0, -1.0).to(vector.dtype)
    summed = by_kind(name, PG_KINDS, {**PLAIN, **TOKEN_MEAN, "aggregation": "token_sum"}, vector.config)
    _, of_sum = run_loss(summed, vector.batch("logp_new", "logp_old", advantages=sign))
    return {**results, "weights": vector.live(-of_sum * sign)}


def opsm_and_dppo(vector: Vector) -> Results:
    """Masks of stale sequences and of tokens whose probability moved too far."""
    new, old = vector.tokens("logp_new"), vector.tokens("logp_old")
    delta, advantages = log_ratio(new, old, vector.mask), vector.tokens("advantages")
    of_sequence = vector.samples("opsm_advantages", len(new))[:, None].expand_as(new)
    keep = off_policy_sequence_mask(delta, of_sequence, vector.mask, vector.config.number("opsm_delta"))
    threshold = vector.config.number("dppo_delta")
    region: dict[str, Any] = {"tv_threshold_low": threshold, "tv_threshold_high": threshold}
    loss = DPPO(**PLAIN, **TOKEN_MEAN, **region, ratio_cap=vector.config.number("dppo_ratio_cap"))
    output, grad = run_loss(loss, vector.batch("logp_new", "logp_old"))
    return {
        "seq_kl": -geometric_log_ratio(delta, vector.mask),
        "opsm_keep": (~(vector.mask & ~keep).any(dim=1)).to(vector.dtype),
        "dppo_valid": vector.live(total_variation_mask(new, old, advantages, vector.mask, **region)),
        "dppo_loss": output.loss,
        "dppo_grad_logp_new": grad,
    }
