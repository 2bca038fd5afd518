"""How strong the pull to the reference is: fixed, or led so that the KL divergence stays near a target.

Knows one factor that multiplies every KL coefficient; does not know whether they are in the loss or in the reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# what one step may change the factor by, as a share of its error
MAX_ERROR = 0.2


class KLController:
    """scale *= 1 + clip(KL / target - 1, -0.2, 0.2) num_samples / horizon, after every step.

    KL 0.12 at a target of 0.1, 256 samples and a horizon of 10,000: the error of 0.2 raises the scale by 0.512 %.

    Args:
        target: nats per trained token, > 0; None: the scale stays 1.
        horizon: samples over which an error of 1 would double the scale, > 0.

    Source:
        Ziegler et al. 2019, arXiv:1909.08593, section 2.2; per token and not per sequence, as verl measures it.
    """

    def __init__(self, *, target: float | None, horizon: int) -> None:
        if target is not None and not target > 0:
            raise ValueError(f"trainer.kl_target must be > 0 or null, got {target}")
        if not horizon > 0:
            raise ValueError(f"trainer.kl_horizon must be > 0, got {horizon}")
        self._target, self._horizon = target, horizon
        self.scale = 1.0

    def follow(self, metrics: Mapping[str, float], *, num_samples: int) -> dict[str, float]:
        """Take the KL divergence of a step in and report the scale; nothing to report when it is fixed.

        `kl/reward_k1` counts, or `kl/ref_k1`: the mean of policy minus reference over trained tokens. A step that was
        skipped measured none and changes nothing.
        """
        if self._target is None:
            return {}
        measured = metrics.get("kl/reward_k1", metrics.get("kl/ref_k1"))
        if measured is not None and math.isfinite(measured):
            error = min(max(measured / self._target - 1.0, -MAX_ERROR), MAX_ERROR)
            self.scale *= 1.0 + error * num_samples / self._horizon
        return {"kl/scale": self.scale}
