"""Vectors of the clipped surrogate and of the means over tokens and sequences.

Knows their names for the package's figures; does not know a formula.
"""

from __future__ import annotations

from torch import Tensor

from asynctensorrlhf.bench.vectors.compare import Results
from asynctensorrlhf.bench.vectors.fields import Vector
from asynctensorrlhf.bench.vectors.parts import (
    MEANS,
    TOKEN_MEAN,
    average,
    by_kind,
    frame,
    gradient,
    radii,
    run_loss,
)
from asynctensorrlhf.losses.diagnostics import clip_fractions
from asynctensorrlhf.losses.gspo import GSPO
from asynctensorrlhf.losses.kl import k2, k3
from asynctensorrlhf.losses.policy_loss import PLAIN
from asynctensorrlhf.losses.ppo import PPO
from asynctensorrlhf.losses.sequence_ratio import geometric_log_ratio
from asynctensorrlhf.losses.surrogate import LOG_RATIO_LIMIT, clipped_surrogate, log_ratio


def clipped(vector: Vector) -> Results:
    """PPO, with separate radii and dual clip where the config has them."""
    region = {**radii(vector), "dual_clip": vector.config.optional_number("clip_ratio_c")}
    output, grad = run_loss(PPO(**frame(vector), **region), vector.batch("logp_new", "logp_old"))
    delta = log_ratio(vector.tokens("logp_new"), vector.tokens("logp_old"), vector.mask)
    metrics = output.metrics
    results = {
        "loss": output.loss,
        "grad_logp_new": grad,
        "per_token_loss": vector.live(clipped_surrogate(delta, vector.tokens("advantages"), **region)),
        "ratio": vector.live(delta.exp()),
        "clip_frac": metrics["loss/clip_fraction"],
        "clip_frac_low": metrics["loss/clip_fraction_low"],
        "clip_frac_high": metrics["loss/clip_fraction_high"],
        "approx_kl_k1": metrics["ratio/approx_kl_k1"],
        "approx_kl_k2": average(k2(delta, delta), vector.mask),
        "approx_kl_k3": metrics["ratio/approx_kl_k3"],
    }
    if region["dual_clip"] is not None:
        results["clip_frac_lower_dual"] = metrics["loss/clip_fraction_dual"]
    return results


def extreme(vector: Vector) -> Results:
    """PPO where log-ratios reach their limit."""
    limit = vector.config.number("log_ratio_clamp")
    region = {**radii(vector), "dual_clip": vector.config.number("clip_ratio_c")}
    leaf = vector.tokens("logp_new").requires_grad_()
    delta = log_ratio(leaf, vector.tokens("logp_old"), vector.mask, limit=limit)
    per_token = clipped_surrogate(delta, vector.tokens("advantages"), **region)
    loss = average(per_token, vector.mask)
    grad = gradient(loss, leaf)
    if limit == LOG_RATIO_LIMIT:
        output, grad = run_loss(PPO(**PLAIN, **TOKEN_MEAN, **region), vector.batch("logp_new", "logp_old"))
        loss = output.loss
    return {
        "loss": loss,
        "grad_logp_new": grad,
        "ratio": vector.live(delta.exp()),
        "per_token_loss": vector.live(per_token),
        "k3_clamped": vector.live(k3(delta, delta)),
    }


def gspo(vector: Vector) -> Results:
    """The clipped surrogate of whole sequences."""
    region = radii(vector)
    loss = GSPO(**frame(vector), **region, sequence_ratio="geometric")
    output, grad = run_loss(loss, vector.batch("logp_new", "logp_old"))
    delta = log_ratio(vector.tokens("logp_new"), vector.tokens("logp_old"), vector.mask)
    of_sequence = geometric_log_ratio(delta, vector.mask)
    # one column: the sequence takes the place of the token
    of_first_token = vector.live(vector.tokens("advantages")).gather(1, vector.mask.int().argmax(1, keepdim=True))
    fractions = clip_fractions(
        of_sequence[:, None], of_first_token, **region, global_num_tokens=vector.mask.any(dim=1).sum()
    )
    return {
        "loss": output.loss,
        "grad_logp_new": grad,
        "seq_ratio": of_sequence.exp(),
        "clip_frac": fractions["loss/clip_fraction"],
    }


def aggregation_modes(vector: Vector) -> Results:
    """Every mean of one matrix: `mode`, or `mode/batch_denominator` to count all sequences."""
    scale, per_token = vector.config.number("scale"), vector.tokens("per_token_loss")

    def mean(mode: str, all_sequences: str | None) -> Tensor:
        if mode not in MEANS:
            raise ValueError(f"unknown mean {mode!r}; known are {', '.join(MEANS)}")
        sequences = "trained" if all_sequences is None else "all"
        return average(per_token, vector.mask, MEANS[mode], sequences=sequences, loss_scale=scale)

    kinds = {r"([a-z-]+)(/batch_denominator)?": mean}
    return {name: by_kind(name, kinds) for name in vector.expected}
