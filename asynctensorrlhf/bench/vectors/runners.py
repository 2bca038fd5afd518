"""Which function runs which vector.

Knows ids; does not know what a vector holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asynctensorrlhf.bench.vectors import advantages, diagnostics, kl, m2po, off_policy, ppo
from asynctensorrlhf.bench.vectors.compare import Results
from asynctensorrlhf.bench.vectors.fields import Vector

RUNNERS: Mapping[str, Callable[[Vector], Results]] = {
    "ppo_clip_token_mean": ppo.clipped,
    "ppo_clip_higher_dual_clip": ppo.clipped,
    "loss_aggregation_modes": ppo.aggregation_modes,
    "group_advantages": advantages.of_groups,
    "group_advantages_degenerate": advantages.of_degenerate_groups,
    "grpo_population_std_k3_kl": advantages.grpo,
    "m2po_second_moment_mask": m2po.second_moment,
    "m2po_mask_edge_cases": m2po.mask_edge_cases,
    "m2po_areal_mask": m2po.areal_mask,
    "m2po_adaptive_clip": m2po.adaptive_clip,
    "m2po_ratio_threshold": m2po.ratio_threshold,
    "decoupled_ppo": off_policy.decoupled_ppo,
    "prox_logp_loglinear": off_policy.loglinear,
    "tis_family": off_policy.tis_family,
    "pg_with_is_weights": off_policy.policy_gradients,
    "gspo": ppo.gspo,
    "opsm_and_dppo_masks": off_policy.opsm_and_dppo,
    "gae_value_clip": advantages.gae_and_value_loss,
    "kl_estimators": kl.kl_estimators,
    "offpolicy_diagnostics": diagnostics.off_policy,
    "extreme_log_ratios": ppo.extreme,
}
"""Vector id to runner."""
