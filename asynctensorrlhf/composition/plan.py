"""The jobs that a command line asks for, each checked before anything is written or loaded.

Knows when a job is refused; does not run one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from asynctensorrlhf.composition.check import ESCAPE_ADVICE, check_composition
from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.faults import find_fault
from asynctensorrlhf.composition.hydra_app import COMPOSE_ERRORS, HydraApp, as_in_the_job, own_keys
from asynctensorrlhf.composition.paths import refuse_used_folder
from asynctensorrlhf.composition.secret_keys import refuse_secrets_in


@dataclass(frozen=True)
class PlannedJob:
    """A job before it runs.

    Attributes:
        number: place in the sweep from 0; None for a single run.
        overrides: what it is composed from; in a sweep without Hydra's own settings, which all jobs share.
        error: why it is refused, if it is.
        warnings: one-line warnings to log with it.
        substitute: the overrides that do compose, when not all do.
    """

    number: int | None
    overrides: tuple[str, ...]
    error: ConfigError | None = None
    warnings: tuple[str, ...] = ()
    substitute: tuple[str, ...] | None = None


def plan_job(
    app: HydraApp, overrides: Sequence[str], number: int | None = None, shared: Sequence[str] = ()
) -> PlannedJob:
    """Compose and check one job; what is wrong with it is in the result."""
    overrides = tuple(overrides)
    try:
        cfg = app.compose((*shared, *overrides))
    except COMPOSE_ERRORS as fault:
        error, substitute = find_fault(app, fault, overrides, shared)
        return PlannedJob(number, overrides, error, substitute=substitute)
    try:
        return PlannedJob(number, overrides, warnings=tuple(check_job(app, cfg, (*shared, *overrides), number)))
    except ConfigError as error:
        return PlannedJob(number, overrides, error)


def check_job(app: HydraApp, cfg: DictConfig, overrides: Sequence[str], number: int | None) -> list[str]:
    """Check a composed job, Hydra's settings and its folder included; returns warnings, raises ConfigError."""
    refuse_secrets_in({"hydra": {"job": {"env_set": dict(cfg.hydra.job.env_set)}}})
    for override in app.parse(overrides):
        if isinstance(override.value(), list) and (options := app.options(override.key_or_group)):
            raise ConfigError(f"{override.input_line}: takes one option, of {', '.join(options)}")
    schema = app.schema(overrides, cfg)
    own = own_keys(cfg)
    try:
        with as_in_the_job(cfg, number) as folder:
            warnings = check_composition(own, schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"output_dir: {str(error).splitlines()[0]}; {ESCAPE_ADVICE}") from error
    for used in {folder, folder if number is None else Path(str(cfg.hydra.sweep.dir))}:
        refuse_used_folder(used, is_resumed=own.resume is not None)
    return warnings


def check_inside_job(app: HydraApp, cfg: DictConfig) -> list[str]:
    """Check a job that was not planned, from within it: its folder is there already."""
    settings = HydraConfig.get()
    overrides = [*settings.overrides.hydra, *settings.overrides.task]
    return check_composition(cfg, app.schema(overrides, app.compose(overrides)))


def plan_sweep(app: HydraApp) -> list[PlannedJob] | None:
    """Every job of a sweep, or None when a sweeper of the user's choice makes them up as it goes.

    Raises:
        ConfigError: the command line can't be expanded into jobs.
    """
    try:
        jobs = app.jobs()
    except COMPOSE_ERRORS as error:
        raise _sweep_fault(app, error) from error
    if jobs is None:
        return None
    shared = app.hydra_overrides()
    return [plan_job(app, overrides, number, shared) for number, overrides in enumerate(jobs)]


def _sweep_fault(app: HydraApp, error: BaseException) -> ConfigError:
    """The override that can't be read, the setting of Hydra that is wrong, or Hydra's reason."""
    for override in app.args.overrides:
        try:
            app.parse([override])
        except COMPOSE_ERRORS as fault:
            return find_fault(app, fault, [override])[0]
    return find_fault(app, error, app.hydra_overrides())[0]
