"""What to log of a batch's log-ratios.

Knows which metrics stay exact when samples with advantage 0 are left out (`loss/...`) and which need the ratio of
every sample (all others); does not know the loss. Metrics are shares of the optimizer batch: add them over
micro-batches and ranks. Nothing here carries a gradient.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from asynctensorrlhf.losses.aggregation import at_least_one
from asynctensorrlhf.losses.surrogate import LOG_RATIO_LIMIT


def is_exact_without_silent_samples(metric: str) -> bool:
    """Whether a metric of a loss is unchanged when samples with advantage 0 were not given to it."""
    return metric.startswith("loss/")


def clip_fractions(
    log_ratio: Float[Tensor, "sample token"],
    advantages: Float[Tensor, "sample token"],
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    global_num_tokens: Tensor | float,
) -> dict[str, Tensor]:
    """Shares of trained tokens whose clip binds: the gradient is zero because of it. Exact without silent samples.

    Low: A < 0 and r < 1 - low. High: A > 0 and r > 1 + high. Dual, only with `dual_clip`: A < 0 and r > dual_clip.

    Args:
        log_ratio: nats.
        advantages: 0 where masked, so that a masked token never counts.
        clip_eps_low: lower clip radius.
        clip_eps_high: upper clip radius.
        dual_clip: bound of the dual clip, or None.
        global_num_tokens: trained tokens of the optimizer batch.
    """
    ratio, bad, good = log_ratio.detach().exp(), advantages < 0, advantages > 0
    binding = {
        "loss/clip_fraction_low": bad & (ratio < 1.0 - clip_eps_low),
        "loss/clip_fraction_high": good & (ratio > 1.0 + clip_eps_high),
    }
    if dual_clip is not None:
        binding["loss/clip_fraction_dual"] = bad & (ratio > dual_clip)
    num_tokens = at_least_one(global_num_tokens)
    return {name: tokens.to(ratio.dtype).sum() / num_tokens for name, tokens in binding.items()}


def ratio_moments(
    log_ratio: Float[Tensor, "sample token"],
    loss_mask: Bool[Tensor, "sample token"],
    *,
    global_num_tokens: Tensor | float,
) -> dict[str, Tensor]:
    """Means over trained tokens of functions of the ratio r = exp(d); they need every sample's ratio.

    k1 = -d and k3 = r - 1 - d estimate KL(behaviour || policy) (k1 may be negative); m2_log_ratio = d^2 is the moment
    the M2PO paper bounds, m2_ratio = r^2 (about 1 + chi^2) is not; clamped: |d| reached the limit of 20 nats.
    The effective sample size over N is mean^2 / m2_ratio.
    """
    delta = log_ratio.detach()
    ratio = delta.exp()
    per_token = {
        "ratio/mean": ratio,
        "ratio/m2_ratio": ratio.square(),
        "ratio/m2_log_ratio": delta.square(),
        "ratio/approx_kl_k1": -delta,
        "ratio/approx_kl_k3": torch.expm1(delta) - delta,
        "ratio/clamped_fraction": (delta.abs() >= LOG_RATIO_LIMIT).to(delta.dtype),
    }
    num_tokens = at_least_one(global_num_tokens)
    return {name: torch.where(loss_mask, value, 0.0).sum() / num_tokens for name, value in per_token.items()}


def ratio_maxima(log_ratio: Float[Tensor, "sample token"]) -> dict[str, Tensor]:
    """The largest |log-ratio|, nats; needs every sample's ratio. Of masked or no tokens: 0."""
    # One zero more: amax of an empty micro-batch is an error.
    return {"ratio/abs_log_ratio_max": functional.pad(log_ratio.detach().abs().flatten(), (0, 1)).amax()}
