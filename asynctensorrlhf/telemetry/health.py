"""Signs that a run cannot learn, or learns slowly, told in words.

Knows which metrics, over a window of steps, mean trouble and what to do about it; does not know who reads it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from asynctensorrlhf.types import StepReport

Metrics = Mapping[str, float]

WAIT_SHARE = 0.1  # of a step; above it the trainer is seen as waiting for rollouts


@dataclass(frozen=True)
class Check:
    """One sign of trouble.

    Attributes:
        measure: reads it off a step; None when the step does not have it.
        enter: mean over the window at which trouble begins.
        leave: mean below which it is over and may be told again; under `enter`, or it is told every step.
        words: the warning, with places for `mean` and `steps`.
    """

    measure: Callable[[Metrics], float | None]
    enter: float
    leave: float
    words: str


def _metric(name: str) -> Callable[[Metrics], float | None]:
    return lambda metrics: metrics.get(name)


def _no_variance(metrics: Metrics) -> float | None:
    share = metrics.get("reward/zero_variance_fraction")
    return None if share is None else float(share == 1.0)


def _no_signal_though_variance(metrics: Metrics) -> float | None:
    """Batches without signal, those apart that `_no_variance` already tells of."""
    has_signal = metrics.get("train/has_signal")
    return None if has_signal is None else float(not has_signal and not _no_variance(metrics))


def _ratio_distance(metrics: Metrics) -> float | None:
    ratio = metrics.get("ratio/mean")
    if ratio is None or math.isnan(ratio):
        return None
    return max(ratio, 1.0 / ratio) if ratio > 0 else math.inf


def _fresh_log_ratio(metrics: Metrics) -> float | None:
    """Of samples whose weights are the trainer's own: after the first update of a step they are not any more."""
    is_fresh = metrics.get("staleness/max_versions") == 0 and metrics.get("train/num_updates") in (None, 1)
    return metrics.get("ratio/abs_log_ratio_max") if is_fresh else None


def _lost_sample_size(metrics: Metrics) -> float | None:
    share = metrics.get("ratio/ess_token")
    return None if share is None or math.isnan(share) else 1.0 - share


CHECKS = (
    Check(
        _no_variance,
        enter=1.0,
        leave=0.9,
        words="no group had any reward variance in the last {steps} steps: every advantage is 0 and "
        "nothing is learnt; look at samples.jsonl, check reward and answers, or raise rollout.group_size or "
        "rollout.temperature",
    ),
    Check(
        _metric("rollout/truncated_fraction"),
        enter=0.9,
        leave=0.8,
        words="{mean:.0%} of the completions of the last {steps} steps were cut at rollout.max_new_tokens: "
        "raise it, or name the token that ends an answer in rollout.stop_token_ids",
    ),
    Check(
        _metric("reward/unscored_fraction"),
        enter=0.5,
        leave=0.4,
        words="{mean:.0%} of the completions of the last {steps} steps got no score: they have advantage 0; "
        "check the reward against samples.jsonl",
    ),
    Check(
        _no_signal_though_variance,
        enter=0.5,
        leave=0.4,
        words="{mean:.0%} of the last {steps} steps had no signal to train on and left the weights as they "
        "were: look at the loss mask (trainer.overlong) and the scores",
    ),
    Check(
        _ratio_distance,
        enter=2.0,
        leave=1.5,
        words="importance ratios are {mean:.1f} times away from 1 over the last {steps} steps: the samples "
        "no longer fit the policy; lower buffer.max_staleness or optim.lr",
    ),
    Check(
        _fresh_log_ratio,
        enter=1.0,
        leave=0.5,
        words="ratios far from 1 with 0 staleness: log-ratios reach {mean:.1f} nats over the last {steps} steps; "
        "the engine and the trainer disagree about the same weights: check rollout.temperature, model.dtype, "
        "tokenization",
    ),
    Check(
        _metric("mismatch/k3"),
        enter=0.1,
        leave=0.05,
        words="engine mismatch: under the weights that sampled them, tokens differ from what the engine reported by a "
        "KL of {mean:.2f} nats over the last {steps} measurements (about 0.001 is usual), which no bound on staleness "
        "cures: check rollout.temperature, model.dtype, tokenization; loss=tis corrects for a small one",
    ),
    Check(
        _lost_sample_size,
        enter=0.7,
        leave=0.6,
        words="the ratios leave {mean:.0%} of the batch without weight over the last {steps} steps (1 - effective "
        "sample size): few tokens decide the update; lower buffer.max_staleness or optim.lr",
    ),
)


@dataclass
class _Watch:
    check: Check
    values: deque[float]
    is_raised: bool = False

    def add(self, metrics: Metrics) -> None:
        value = self.check.measure(metrics)
        if value is not None and not math.isnan(value):
            self.values.append(value)

    def warning(self) -> str | None:
        """The words when trouble begins; None while it lasts and when there is none."""
        mean = sum(self.values) / len(self.values)
        was_raised = self.is_raised
        self.is_raised = mean >= (self.check.leave if was_raised else self.check.enter)
        is_news = self.is_raised and not was_raised
        return self.check.words.format(mean=mean, steps=len(self.values)) if is_news else None


@dataclass
class Health:
    """Watches the last `window` steps; holds nothing that grows with the run.

    Example:
        >>> health = Health(window=2)
        >>> step = StepReport(step=1, policy_version=1, metrics={"rollout/truncated_fraction": 1.0})
        >>> health.check(step), [words[:23] for words in health.check(step)], health.check(step)
        ([], ['100% of the completions'], [])
    """

    window: int
    _watches: list[_Watch] = field(init=False)
    _wait_s: float = field(init=False, default=0.0)
    _total_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._watches = [_Watch(check, deque(maxlen=self.window)) for check in CHECKS]

    def check(self, report: StepReport) -> list[str]:
        """Take a step in; warnings about trouble that began with it, each told once per occurrence."""
        self._wait_s += report.metrics.get("time/wait_for_batch_s", 0.0)
        self._total_s += report.metrics.get("time/step_s", 0.0)
        for watch in self._watches:
            watch.add(report.metrics)
        return self._news(min_steps=self.window)

    def closing(self) -> list[str]:
        """Trouble of a run that ended before its window was full."""
        return self._news(min_steps=1)

    def verdict(self) -> str | None:
        """Who waited for whom over the whole run; None when no step was timed."""
        if not self._total_s:
            return None
        share = min(1.0, self._wait_s / self._total_s)
        if share >= WAIT_SHARE:
            return (
                f"the trainer waited {share:.0%} of its time for rollouts: generation is the bottleneck "
                "(rollout.num_workers and rollout.max_concurrent speed it up)"
            )
        return f"the trainer waited {share:.0%} of its time for rollouts: training is the bottleneck"

    def _news(self, min_steps: int) -> list[str]:
        told = (watch.warning() for watch in self._watches if len(watch.values) >= min_steps)
        return [words for words in told if words is not None]
