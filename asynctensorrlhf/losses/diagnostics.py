"""What to log of a batch's log-ratios.

Knows which metrics stay exact when samples with advantage 0 are left out (`loss/...`) and which need the ratio of
every sample (all others); does not know the loss. Metrics are shares of the optimizer batch: add them over
micro-batches and ranks. Nothing here carries a gradient.
"""

import math
from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from asynctensorrlhf.losses.aggregation import at_least_one
from asynctensorrlhf.losses.sequence_ratio import product_log_ratio
from asynctensorrlhf.losses.surrogate import LOG_RATIO_LIMIT


def is_exact_without_silent_samples(metric: str) -> bool:
    """Whether a metric of a loss is unchanged when samples with advantage 0 were not given to it."""
    return metric.startswith("loss/")


def clip_fractions(
    log_ratio: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    *,
    clip_eps_low: float | Tensor,
    clip_eps_high: float | Tensor,
    dual_clip: float | None = None,
    global_num_tokens: Tensor | float,
) -> dict[str, Tensor]:
    """Shares of trained tokens whose clip binds: the gradient is zero because of it. Exact without silent samples.

    Low: A < 0 and r < 1 - low. High: A > 0 and r > 1 + high. Without a suffix: both. Dual, only with `dual_clip`: A < 0
    and r > dual_clip. Only what binds counts: A > 0 with r < 1 - low is not clipped by the minimum.

    Args:
        log_ratio: nats.
        advantages: 0 where masked, so that a masked token never counts.
        clip_eps_low: lower clip radius.
        clip_eps_high: upper clip radius.
        dual_clip: bound of the dual clip, or None.
        global_num_tokens: trained tokens of the optimizer batch.
    """
    ratio, bad, good = log_ratio.detach().exp(), advantages < 0, advantages > 0
    low, high = bad & (ratio < 1.0 - clip_eps_low), good & (ratio > 1.0 + clip_eps_high)
    binding = {
        "loss/clip_fraction": low | high,
        "loss/clip_fraction_low": low,
        "loss/clip_fraction_high": high,
    }
    if dual_clip is not None:
        binding["loss/clip_fraction_dual"] = bad & (ratio > dual_clip)
    counts = torch.stack(list(binding.values())).sum(dim=(1, 2)).to(ratio.dtype)
    return dict(zip(binding, counts / at_least_one(global_num_tokens), strict=True))


def ratio_metrics(
    log_ratio: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    global_num_tokens: Tensor | float,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Sums, maxima and minima of the ratio r = exp(d) over trained tokens and sequences; they need every sample.

    Per token, divided by the tokens of the optimizer batch: k1 = -d and k3 = r - 1 - d estimate KL(behaviour || policy)
    (k1 may be negative); m2_log_ratio = d^2 is the moment the M2PO paper bounds, m2_ratio = r^2 (1 + chi^2) is not;
    mult_prob_error = exp|d|; clamped: |d| reached the limit of 20 nats. What starts with `_` is a part of a figure that
    does not add up by itself: `derived` makes it, and the part is not logged.

    Args:
        log_ratio: policy minus behaviour, nats, 0 where masked.
        loss_mask: True on the tokens that are trained.
        global_num_tokens: trained tokens of the optimizer batch.
    """
    delta = log_ratio.detach()
    ratio, size = delta.exp(), delta.abs()
    per_token = {
        "ratio/mean": ratio,
        "ratio/m2_ratio": ratio.square(),
        "ratio/m2_log_ratio": delta.square(),
        "ratio/approx_kl_k1": -delta,
        "ratio/approx_kl_k3": torch.expm1(delta) - delta,
        "ratio/abs_log_ratio_mean": size,
        "ratio/mult_prob_error": size.exp(),
        "ratio/clamped_fraction": (size >= LOG_RATIO_LIMIT).to(delta.dtype),
    }
    # one sum over all figures: on a small batch the calls cost more than the numbers
    live = torch.where(loss_mask, torch.stack(list(per_token.values())), 0.0).sum(dim=(1, 2))
    means = dict(zip(per_token, live / at_least_one(global_num_tokens), strict=True))
    # one value more: the extreme of an empty micro-batch is an error
    signed = torch.where(loss_mask, torch.stack([delta, -delta]), -torch.inf).flatten(1)
    extremes = functional.pad(signed, (0, 1), value=-torch.inf).amax(dim=1)
    maxima = {"ratio/abs_log_ratio_max": extremes.amax().clamp(min=0.0), "ratio/max": extremes[0].exp()}
    return means | _sequence_sums(delta, loss_mask), maxima, {"ratio/min": (-extremes[1]).exp()}


def _sequence_sums(delta: Float[Tensor, "sample token"], loss_mask: Bool[Tensor, "sample token"]) -> dict[str, Tensor]:
    """Sums over sequences with a trained token, not divided: `derived` knows how many there are."""
    lengths = loss_mask.sum(dim=1)
    is_trained = lengths > 0
    total = product_log_ratio(delta, loss_mask)
    mean = delta.sum(dim=1) / lengths.clamp(min=1)
    per_sequence = {
        "_sequence/count": torch.ones_like(total),
        "_sequence/weight": total.exp(),
        "_sequence/weight_sq": (2 * total).exp(),
        "_sequence/log_ppl_diff": -mean,
        "_sequence/log_ppl_abs_diff": mean.abs(),
        "_sequence/ppl_ratio": (-mean).exp(),
    }
    sums = torch.where(is_trained, torch.stack(list(per_sequence.values())), 0.0).sum(dim=1)
    return dict(zip(per_sequence, sums, strict=True))


def derived(sums: Mapping[str, float]) -> dict[str, float]:
    """`sums` over all micro-batches and ranks, with what only they together can tell; parts are left out.

    ess_token = mean(r)^2 / mean(r^2), the effective share of the tokens, and ess_sequence the same of whole sequences,
    both on raw weights; chi2_token = mean(r^2) - 1 (below 0 is possible in a sample), chi2_sequence likewise; std of r;
    log_ppl_diff, its absolute value and ppl_ratio are of log perplexity, policy minus sampler, per sequence and then
    averaged.
    """
    whole = {name: value for name, value in sums.items() if not name.startswith("_")}
    if "ratio/m2_ratio" not in sums:
        return whole
    mean, square = sums["ratio/mean"], sums["ratio/m2_ratio"]
    whole |= {
        "ratio/std": math.sqrt(max(square - mean**2, 0.0)),
        "ratio/chi2_token": square - 1.0,
        "ratio/ess_token": _share(mean**2, square),
    }
    count = sums.get("_sequence/count", 0.0)
    if count:
        weight, weight_sq = sums["_sequence/weight"] / count, sums["_sequence/weight_sq"] / count
        whole |= {"ratio/chi2_sequence": weight_sq - 1.0, "ratio/ess_sequence": _share(weight**2, weight_sq)}
        whole |= {
            f"ratio/{name}": sums[f"_sequence/{name}"] / count
            for name in ("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio")
        }
    return whole


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
