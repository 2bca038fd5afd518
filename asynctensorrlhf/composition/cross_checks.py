"""Combinations of values that cannot work, and those that probably should not.

Knows what keys of buffer, rollout, data and trainer mean together, `loss_checks` those of the objective; looks at keys
that the chosen options have, never at the names of options. Each check is a function of plain resolved config data that
raises ConfigError with the fix, or returns a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asynctensorrlhf.composition.errors import ConfigError, show_value
from asynctensorrlhf.composition.values import ABSENT, Values


def buffer_holds_a_step(values: Values) -> None:
    """A buffer smaller than a step deadlocks: the trainer waits for groups that are never admitted."""
    if not values.has("buffer.capacity", "trainer.groups_per_step"):
        return
    capacity, needed = values["buffer.capacity"], values["trainer.groups_per_step"]
    if capacity < needed:
        raise ConfigError(
            f"buffer.capacity={capacity}: the trainer would wait for ever; must be >= trainer.groups_per_step={needed}"
        )


def minibatches_have_groups(values: Values) -> None:
    """Each optimizer update of a step needs at least one group."""
    if not values.has("trainer.minibatches_per_step", "trainer.groups_per_step"):
        return
    parts, groups = values["trainer.minibatches_per_step"], values["trainer.groups_per_step"]
    if parts > groups:
        raise ConfigError(f"trainer.minibatches_per_step={parts}: must be <= trainer.groups_per_step={groups}")


def stop_tokens_are_ids(values: Values) -> None:
    """Token ids are counted from 0."""
    if values.has("rollout.stop_token_ids") and min(values["rollout.stop_token_ids"], default=0) < 0:
        raise ConfigError(f"rollout.stop_token_ids={values['rollout.stop_token_ids']}: must be token ids >= 0")


def betas_are_two_decay_rates(values: Values) -> None:
    """Adam has two decay rates; 1 would never forget."""
    if values.has("optim.betas"):
        betas = values["optim.betas"]
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"optim.betas={betas}: must be two floats in [0, 1)")


def template_is_given_once(values: Values) -> None:
    """One of two templates would be ignored."""
    if values.has("data.template", "data.template_file"):
        raise ConfigError("data.template_file: data.template is given too; give one of them")


def resume_has_something_to_resume(values: Values) -> None:
    """`resume` names a checkpoint folder, or means one in a folder that does not change from start to start."""
    resume = values["resume"]
    if resume in (None, ABSENT):
        return
    if resume != "auto" and not Path(resume).is_dir():
        raise ConfigError(f"resume={show_value(resume)}: no such folder; must be auto, a checkpoint folder or null")
    if resume == "auto" and "${now:" in values.raw_output_dir:
        raise ConfigError(
            "resume=auto: output_dir is a new folder at every start, with nothing in it to resume; "
            "add output_dir=<the folder of the run>"
        )


def workers_are_used(values: Values) -> str | None:
    """A synchronous run generates in the trainer's own thread, with one engine."""
    if values["trainer.mode"] != "sync" or values["rollout.num_workers"] in (1, ABSENT):
        return None
    return f"rollout.num_workers={values['rollout.num_workers']}: only one of them generates with trainer.mode=sync"


CHECKS: tuple[Callable[[Values], str | None], ...] = (
    buffer_holds_a_step,
    minibatches_have_groups,
    stop_tokens_are_ids,
    betas_are_two_decay_rates,
    template_is_given_once,
    resume_has_something_to_resume,
    workers_are_used,
)
