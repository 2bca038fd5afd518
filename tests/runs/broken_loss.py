"""Losses that a user might have written: PPO that turns NaN, one that raises, and one that can't be built."""

from __future__ import annotations

from dataclasses import replace

from asynctensorrlhf.losses.policy_loss import PLAIN
from asynctensorrlhf.losses.ppo import PPO


class BrokenLoss:
    """Delegates to PPO; `fail_from` counts calls from 1, None: only the second fails."""

    needs: frozenset[str] = frozenset()
    sequences = "trained"
    acts_without_advantage = False

    def __init__(self, *, clip_eps_low, clip_eps_high, fail_from):
        radii = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high, "dual_clip": None}
        self.ppo = PPO(**PLAIN, **radii, aggregation="token_mean", sequences="trained", loss_scale=None)
        self.fail_from, self.num_calls = fail_from, 0

    def plan(self, inputs):
        raise NotImplementedError

    def __call__(self, inputs):
        self.num_calls += 1
        output = self.ppo(inputs)
        is_broken = self.num_calls == 2 if self.fail_from is None else self.num_calls >= self.fail_from
        return replace(output, loss=output.loss * float("nan")) if is_broken else output


class RaisingLoss(BrokenLoss):
    """Raises where `BrokenLoss` turns NaN; only calls that train are counted, not those of diagnostics."""

    def __call__(self, inputs):
        if not inputs.policy_logprobs.requires_grad:
            return self.ppo(inputs)
        output = super().__call__(inputs)
        if output.loss.isnan():
            raise ArithmeticError("the loss broke")
        return output


class UnbuildableLoss:
    """Fails before anything runs."""

    def __init__(self, **_):
        raise ArithmeticError("the loss can't be built")
