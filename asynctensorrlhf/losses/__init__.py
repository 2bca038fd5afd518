"""Policy losses: pure functions of log-probabilities and advantages.

Knows formulas, denominators and their diagnostics; does not know buffers, models or optimizers.
"""

from asynctensorrlhf.losses.grpo import compute_grpo_loss
from asynctensorrlhf.losses.m2po import compute_m2po_loss
from asynctensorrlhf.losses.ppo import compute_ppo_loss

__all__ = ["compute_grpo_loss", "compute_m2po_loss", "compute_ppo_loss"]
