"""Copies that nobody else can write to.

Knows how to copy a group, or any value made of containers and tensors; does not know why it is kept.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from asynctensorrlhf.types import SampleGroup


def own_group(group: SampleGroup) -> SampleGroup:
    """The group with tensors of its own: detached, usable outside inference mode, no view of a larger tensor.

    Each field of all samples is copied at once, which matters for groups of many short samples. Prompts are shared:
    their ids belong to the data source, which doesn't change them.
    """
    with _normal_mode():
        completion_ids = _own_rows([sample.completion_ids for sample in group.samples])
        behaviour_logprobs = _own_rows([sample.behaviour_logprobs for sample in group.samples])
        token_versions = _own_rows([sample.token_versions for sample in group.samples])
        rewards, advantages = group.rewards.detach().clone(), group.advantages.detach().clone()
    samples = tuple(
        replace(sample, completion_ids=ids, behaviour_logprobs=logprobs, token_versions=versions)
        for sample, ids, logprobs, versions in zip(
            group.samples, completion_ids, behaviour_logprobs, token_versions, strict=True
        )
    )
    return replace(group, samples=samples, rewards=rewards, advantages=advantages)


def own_value(value: Any) -> Any:
    """A deep copy of lists, tuples, dicts, dataclasses, tensors and whatever `copy.deepcopy` knows.

    Tensors in containers are cloned one by one: `deepcopy` of a view would copy the whole tensor it looks into.
    """
    if isinstance(value, Tensor):
        with _normal_mode():
            return value.detach().clone()
    if type(value) is dict:
        return {key: own_value(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(own_value(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type) and all(field.init for field in fields(value)):
        return replace(value, **{field.name: own_value(getattr(value, field.name)) for field in fields(value)})
    return copy.deepcopy(value)


def _own_rows(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.split(torch.cat(tuple(rows)).detach(), [len(row) for row in rows])


def _normal_mode() -> AbstractContextManager[None]:
    # a copy made inside inference mode would be an inference tensor again, which no loss can use
    return torch.inference_mode(False)
