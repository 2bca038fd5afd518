"""Vectors of M2PO: the paper's mask, AReaL's, the authors' adaptive clip and this project's threshold.

Knows their names for the package's figures; does not know a formula.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asynctensorrlhf.bench.vectors.compare import TIES, Results
from asynctensorrlhf.bench.vectors.fields import Fields, Vector
from asynctensorrlhf.bench.vectors.parts import TOKEN_MEAN, frame, radii, run_loss
from asynctensorrlhf.losses.m2_mask import adaptive_radii, mean_over, second_moment_mask, trust_region_tokens
from asynctensorrlhf.losses.m2po import DEFAULTS, M2PO
from asynctensorrlhf.losses.policy_loss import PLAIN
from asynctensorrlhf.losses.surrogate import log_ratio

# a ratio this near to a bound that was taken from it is on the bound
_NEAR = {torch.float64: 1e-9, torch.float32: 1e-6}


def second_moment(vector: Vector) -> Results:
    """The paper's Algorithm 1 and its loss."""
    loss = _loss(
        **frame(vector),
        variant="second_moment",
        m2_threshold=vector.config.number("m2_threshold"),
        denominator=vector.config.choice(
            "denominator", {"all_response_tokens": "all_tokens", "kept_response_tokens": "kept_tokens"}
        ),
    )
    inputs = vector.batch("logp_new", "logp_old")
    output, grad = run_loss(loss, inputs)
    plan = loss.plan(inputs)
    delta = log_ratio(vector.tokens("logp_new"), vector.tokens("logp_old"), vector.mask)
    eligible = trust_region_tokens(delta, vector.tokens("advantages"), vector.mask)
    return {
        "loss": output.loss,
        "grad_logp_new": grad,
        "keep_mask": vector.live(plan.keep_mask),
        "trust_region_mask": vector.live(eligible),
        "n_trust_region": eligible.sum(),
        "n_masked": vector.mask.sum() - plan.num_kept,
        "m2_before": plan.metrics["m2po/m2_before"],
        "m2_after": plan.metrics["m2po/m2_after"],
        "m2_all_tokens": plan.metrics["m2po/m2_all"],
        "masked_frac": plan.metrics["m2po/masked_fraction"],
    }


def mask_edge_cases(vector: Vector) -> Results:
    """The same mask alone, of log-ratios that are given; every input is a case."""
    threshold = vector.config.number("m2_threshold")
    return {name: _edge_case(vector.inputs.child(name), threshold, vector.dtype) for name in vector.inputs}


def _edge_case(case: Fields, threshold: float, dtype: torch.dtype) -> Results:
    delta = case.tensor("log_ratio", num_axes=2, dtype=dtype)
    advantages = case.tensor("advantages", num_axes=2, dtype=dtype)
    if delta.shape != advantages.shape:
        raise ValueError(f"log_ratio has the shape {tuple(delta.shape)}, advantages {tuple(advantages.shape)}")
    everything = torch.ones_like(delta, dtype=torch.bool)
    eligible = trust_region_tokens(delta, advantages, everything)
    keep = second_moment_mask(delta, eligible, everything, threshold, strict=False)
    return {**_moments(delta, eligible, keep), "keep_mask": keep.to(dtype), "n_trust_region": eligible.sum()}


def areal_mask(vector: Vector) -> Results:
    """AReaL's mask: every token eligible, the mean strictly below the threshold."""
    delta = log_ratio(vector.tokens("logp_prox"), vector.tokens("logp_behave"), vector.mask)
    threshold = vector.config.number("m2_threshold")
    keep = second_moment_mask(delta, vector.mask, vector.mask, threshold, strict=True)
    return {
        **_moments(delta, vector.mask, keep),
        "keep_mask": vector.live(keep),
        "n_masked": vector.mask.sum() - keep.sum(),
    }


def adaptive_clip(vector: Vector) -> Results:
    """The authors' code: radii found from the second moment."""
    budget = vector.config.number("M2_budget")
    floor_low, floor_high = (vector.config.optional_number(f"miniclip_{side}") for side in ("low", "high"))
    loss = _loss(
        **frame(vector),
        variant="adaptive_clip",
        m2_threshold=budget,
        clip_floor_low=floor_low,
        clip_floor_high=floor_high,
    )
    output, grad = run_loss(loss, vector.batch("logp_new", "logp_old"))
    delta = log_ratio(vector.tokens("logp_new"), vector.tokens("logp_old"), vector.mask)
    eligible = trust_region_tokens(delta, vector.tokens("advantages"), vector.mask)
    found = adaptive_radii(delta, eligible, budget, floor_low=floor_low, floor_high=floor_high)
    return {
        "loss": output.loss,
        "grad_logp_new": grad,
        "tau": found.tau,
        "eps_low": found.clip_eps_low,
        "eps_high": found.clip_eps_high,
        "m2_before": found.m2_before,
        "m2_after": found.m2_after,
        TIES: _on_a_bound(delta, eligible, found.clip_eps_low, found.clip_eps_high).nonzero().tolist(),
    }


def ratio_threshold(vector: Vector) -> Results:
    """This project's variant, and the same with a threshold that masks every token."""
    inputs = vector.batch("logp_new", "logp_old")
    region = radii(vector)

    def at(threshold: float) -> tuple[M2PO, Results]:
        loss = _loss(**PLAIN, **TOKEN_MEAN, **region, variant="ratio_threshold", ratio_sq_threshold=threshold)
        output, grad = run_loss(loss, inputs)
        return loss, {
            "loss": output.loss,
            "grad_logp_new": grad,
            "n_kept": loss.plan(inputs).num_kept,
            "m2_ratio": output.metrics["ratio/m2_ratio"],
            "clip_frac": output.metrics["loss/clip_fraction"],
        }

    loss, results = at(vector.config.number("gamma_threshold"))
    plan = loss.plan(inputs)
    return {
        **results,
        "keep_mask": vector.live(plan.keep_mask),
        "m2_ratio_kept": plan.metrics["m2po/m2_ratio_kept"],
        "masked_frac": plan.metrics["m2po/masked_fraction"],
        "all_masked_case": at(0.0)[1],
    }


def _loss(**arguments: Any) -> M2PO:
    clip = {"ratio_sq_threshold": 4.0, "clip_eps_low": 0.2, "clip_eps_high": 0.2}
    return M2PO(**{**DEFAULTS, **clip, **arguments})


def _moments(delta: Tensor, eligible: Tensor, keep: Tensor) -> dict[str, Tensor]:
    return {"m2_before": mean_over(delta.square(), eligible), "m2_after": mean_over(delta.square(), eligible & keep)}


def _on_a_bound(delta: Tensor, eligible: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Tokens that the clip was taken from: whether it binds there is a matter of rounding."""
    ratio, near = delta.exp(), _NEAR[delta.dtype]
    bound = torch.where(delta > 0, 1 + high, 1 - low)
    return eligible & ((ratio - bound).abs() <= near * ratio)
