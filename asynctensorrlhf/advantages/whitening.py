"""Whitening: advantages of a batch brought to mean 0 and variance 1 over its trained tokens.

Knows masked moments; does not know what the values are. No host synchronisation.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# added to the variance
WHITENING_EPS = 1e-8


def whiten(
    values: Float[Tensor, "sample token"], mask: Bool[Tensor, "sample token"], *, shift_mean: bool = True
) -> Float[Tensor, "sample token"]:
    """(value - mean) / sqrt(variance + 1e-8) over masked tokens, n - 1 in the variance; 0 elsewhere.

    Of a single token the variance is taken as 0: its whitened value is 0.

    Args:
        values: other positions may hold anything, NaN included.
        mask: True on the tokens that count.
        shift_mean: false adds the mean back: only the scale changes, as for rewards.

    Source:
        TRL and verl `masked_whiten`.
    """
    wide = to_wide(torch.where(mask, values, 0.0))
    num = mask.sum()
    mean = wide.sum() / num.clamp(min=1)
    deviation = torch.where(mask, wide - mean, 0.0)
    variance = deviation.square().sum() / (num - 1).clamp(min=1)
    whitened = deviation / (variance + WHITENING_EPS).sqrt()
    if not shift_mean:
        whitened = torch.where(mask, whitened + mean, 0.0)
    return whitened.to(values.dtype)


def to_wide(values: Tensor) -> Tensor:
    """In the precision of sums over a batch: float64, where the device has it."""
    return values if values.device.type == "mps" else values.double()
