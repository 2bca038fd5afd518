"""The vector of diagnostics: how far sampler and trainer lie apart, and how old the samples are.

Knows its names for the package's figures; does not know a formula.
"""

from __future__ import annotations

from collections import Counter

import torch

from asynctensorrlhf.bench.vectors.compare import Counts, Results
from asynctensorrlhf.bench.vectors.fields import Vector
from asynctensorrlhf.losses.m2_mask import mean_over
from asynctensorrlhf.losses.mismatch import mismatch_metrics

FIGURES = {
    "kl_k1_rollout_train": "k1",
    "kl_k2": "k2",
    "kl_k3_rollout_train": "k3",
    "m2_log_ratio": "m2_log_ratio",
    "m2_ratio": "m2_ratio",
    "chi2_token": "chi2_token",
    "pearson_chi2_token": "pearson_chi2_token",
    "chi2_seq": "chi2_sequence",
    "ess_token": "ess_token",
    "ess_sequence": "ess_sequence",
    "is_weight_mean": "weight_mean",
    "is_weight_max": "weight_max",
    "is_weight_min": "weight_min",
    "mean_abs_logprob_diff": "abs_log_ratio_mean",
    "max_abs_logprob_diff": "abs_log_ratio_max",
    "mean_abs_prob_diff": "abs_prob_mean",
    "token_mult_prob_error": "mult_prob_error",
    "training_ppl": "policy_ppl",
    "rollout_ppl": "behaviour_ppl",
    "log_ppl_diff": "log_ppl_diff",
    "log_ppl_abs_diff": "log_ppl_abs_diff",
    "ppl_ratio": "ppl_ratio",
}


def off_policy(vector: Vector) -> Results:
    """Figures over the trained tokens and over the sequences."""
    metrics = mismatch_metrics(vector.tokens("logp_train"), vector.tokens("logp_rollout"), vector.mask)
    staleness = vector.samples("staleness_per_sequence", len(vector.mask))
    return {
        **{name: metrics[f"mismatch/{figure}"] for name, figure in FIGURES.items()},
        "staleness_token_mean": mean_over(staleness[:, None].expand(vector.mask.shape), vector.mask),
        "staleness_seq_mean": mean_over(staleness[:, None], torch.ones_like(vector.mask[:, :1])),
        "staleness_max": staleness.max(),
        "staleness_hist_seq": Counts(Counter(map(_show, staleness.tolist()))),
    }


def _show(staleness: float) -> str:
    return str(int(staleness)) if staleness.is_integer() else str(staleness)
