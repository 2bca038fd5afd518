"""Turns complete groups of samples into scored groups: rewards and advantages, each computed once.

Knows how a batch for a reward is laid out; does not know which reward or which advantage it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asynctensorrlhf.interfaces import GroupAdvantage, Reward
from asynctensorrlhf.types import RewardInputs, Sample, SampleGroup


def reward_inputs(samples: Sequence[Sample], answers: Mapping[str, Tensor]) -> RewardInputs:
    """Right-pad completions to a batch on their device and gather the answer rows of their prompts."""
    ids = pad_sequence([sample.completion_ids for sample in samples], batch_first=True)
    lengths = torch.tensor([len(sample.completion_ids) for sample in samples], device=ids.device)
    row_ids = torch.tensor([sample.prompt.row_id for sample in samples], device=ids.device)
    return RewardInputs(
        completion_ids=ids,
        completion_mask=torch.arange(ids.shape[1], device=ids.device) < lengths[:, None],
        row_ids=row_ids,
        answers={name: column[row_ids] for name, column in answers.items()},
    )


class Scorer:
    """Scores groups with a reward and gives them advantages.

    Args:
        reward: scores samples from their ids.
        answers: what `reward.encode` made of the rows, on the device of the completions.
        advantage: advantages of complete groups.
        penalty: added to the rewards of groups that are trained, from the lengths of completions; None: nothing is.
    """

    def __init__(
        self,
        *,
        reward: Reward,
        answers: Mapping[str, Tensor],
        advantage: GroupAdvantage,
        penalty: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.reward, self.answers, self.advantage, self.penalty = reward, answers, advantage, penalty

    def rewards(self, samples: Sequence[Sample]) -> Tensor:
        """One float32 reward per sample, on the samples' device; NaN = no score.

        Raises:
            ValueError: the reward returned another shape than one number per sample.
        """
        with torch.no_grad():
            rewards = self.reward(reward_inputs(samples, self.answers))
        if not isinstance(rewards, Tensor) or rewards.shape != (len(samples),):
            raise ValueError(
                f"reward must return a tensor of shape ({len(samples)},), got {getattr(rewards, 'shape', rewards)}"
            )
        # a user's reward may return an inference tensor, which autograd refuses
        return rewards.detach().clone().float()

    def score(self, groups: Sequence[list[Sample]]) -> list[SampleGroup]:
        """One reward call for all samples of all groups; the groups have one common size."""
        if not groups:
            return []
        samples = [sample for group in groups for sample in group]
        rewards = self.rewards(samples)
        if self.penalty is not None:
            lengths = torch.tensor([len(sample.completion_ids) for sample in samples], device=rewards.device)
            rewards = rewards + self.penalty(lengths)
        rewards = rewards.view(len(groups), -1)
        with torch.no_grad():
            advantages = self.advantage(rewards)
        oldest, newest = _version_bounds(groups)
        return [
            SampleGroup(
                prompt=group[0].prompt,
                samples=tuple(group),
                rewards=rewards[i],
                advantages=advantages[i],
                min_policy_version=oldest[i],
                max_policy_version=newest[i],
            )
            for i, group in enumerate(groups)
        ]


def _version_bounds(groups: Sequence[list[Sample]]) -> tuple[list[int], list[int]]:
    """Oldest and newest policy version of each group: weights only get newer while a sample grows."""
    first = torch.stack([sample.token_versions[0] for group in groups for sample in group])
    last = torch.stack([sample.token_versions[-1] for group in groups for sample in group])
    shape = (len(groups), -1)
    oldest: list[int] = first.view(shape).amin(dim=1).tolist()
    newest: list[int] = last.view(shape).amax(dim=1).tolist()
    return oldest, newest


def overlong_penalty(
    lengths: Int[Tensor, " sample"], *, max_new_tokens: int, overlong_buffer: int
) -> Float[Tensor, " sample"]:
    """0 up to `max_new_tokens - overlong_buffer` tokens, then falling evenly to -1 at `max_new_tokens`.

    10 tokens allowed and a buffer of 4: 6 tokens cost nothing, 7 cost 0.25, 10 cost 1.

    Args:
        lengths: sampled tokens of each completion.
        max_new_tokens: the limit that cuts completions.
        overlong_buffer: tokens before the limit in which the penalty grows, from 1 to below the limit.

    Source:
        DAPO, Yu et al. 2025, eq. 13, arXiv:2503.14476.
    """
    return ((max_new_tokens - overlong_buffer - lengths) / overlong_buffer).clamp(-1.0, 0.0)
