"""What a step's groups tell before they are trained: rewards, lengths, staleness, speed.

Knows groups; does not know losses or who logs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asynctensorrlhf.types import SampleGroup


def group_metrics(groups: Sequence[SampleGroup], policy_version: int, step_s: float) -> dict[str, float]:
    """Metrics of the groups that a step takes at `policy_version`; `step_s` seconds is how long the step took.

    `reward/zero_variance_fraction` counts groups whose advantages are all 0. `staleness/*` is in versions:
    `max_versions` and `mean_versions` of groups by their oldest token, `token_mean_versions` of every sampled token by
    the version that sampled it, and `token_fraction_K` the share of tokens that are K versions old, up to the oldest.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.cat([group.rewards for group in groups])
    lengths = [len(sample.completion_ids) for sample in samples]
    staleness = [policy_version - group.min_policy_version for group in groups]
    has_signal = torch.stack([(group.advantages != 0).any() for group in groups])
    token_staleness = policy_version - torch.cat([sample.token_versions for sample in samples])
    counts = torch.bincount(token_staleness.clamp(min=0)).tolist()
    reward_mean, unscored, signal = torch.stack(
        [rewards.nanmean(), rewards.isnan().float().mean(), has_signal.float().mean()]
    ).tolist()
    return {
        "reward/mean": reward_mean,
        "reward/unscored_fraction": unscored,
        "reward/zero_variance_fraction": 1.0 - signal,
        "rollout/completion_length_mean": sum(lengths) / len(lengths),
        "rollout/completion_length_max": float(max(lengths)),
        "rollout/truncated_fraction": sum(s.finish_reason == "length" for s in samples) / len(samples),
        "staleness/max_versions": float(max(staleness)),
        "staleness/mean_versions": sum(staleness) / len(staleness),
        "staleness/token_mean_versions": token_staleness.float().mean().item(),
        **{f"staleness/token_fraction_{age}": count / sum(counts) for age, count in enumerate(counts)},
        "throughput/completion_tokens_per_s": sum(lengths) / step_s,
    }
