"""`atrlhf train`: every job checked first, then run by Hydra in its own folder with its own log.

Knows how a run or a sweep starts, fails and ends; does not know what a job does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.faults import find_fault
from asynctensorrlhf.composition.hydra_app import COMPOSE_ERRORS, HydraApp, parse_arguments
from asynctensorrlhf.composition.plan import PlannedJob, check_inside_job, plan_job, plan_sweep
from asynctensorrlhf.composition.secret_keys import refuse_secrets_of
from asynctensorrlhf.composition.sweep import Outcome, SweepJob, report_sweep, summary_in
from asynctensorrlhf.composition.usage import help_text

LOG = logging.getLogger(__name__)
# Goes to the job's log file only (conf/train.yaml): the command line prints errors by itself, once.
OUTCOME_LOG = logging.getLogger("asynctensorrlhf.outcome")

EXIT_OK, EXIT_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 0, 1, 2, 130


Job = Callable[[DictConfig, Path, SweepJob | None], Mapping[str, Any] | None]


def run_jobs(argv: Sequence[str], job: Job) -> int:
    """Run what the arguments of `atrlhf train` ask for.

    Args:
        argv: flags and overrides in Hydra's grammar.
        job: called with each job's config (without Hydra's node), folder and place; returns its summary.

    Returns:
        Exit code: 0 when every job succeeded, 2 for a bad config (one line on stderr, nothing written), 130 or 143
        when interrupted, else 1.
    """
    try:
        refuse_secrets_of(argv)
        args = parse_arguments(argv)
        app = HydraApp(args)
        if args.help:
            sys.stdout.write(help_text(app))
            return EXIT_OK
        if args.cfg or args.info or args.hydra_help or args.shell_completion:
            return _inspect(app)
        return _run_sweep(app, job) if _is_sweep(app) else _run_single(app, job)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt as error:
        return exit_code_of(error)


def _is_sweep(app: HydraApp) -> bool:
    try:
        return app.is_sweep()
    except COMPOSE_ERRORS as error:
        raise find_fault(app, error, app.hydra_overrides())[0] from error


def _inspect(app: HydraApp) -> int:
    try:
        if app.args.cfg or app.args.info:
            app.compose(app.args.overrides)
        app.inspect()
    except COMPOSE_ERRORS as error:
        raise find_fault(app, error, app.args.overrides)[0] from error
    except SystemExit as done:
        return int(done.code or EXIT_OK)
    return EXIT_OK


def _run_single(app: HydraApp, job: Job) -> int:
    planned = plan_job(app, app.args.overrides)
    if planned.error is not None:
        raise planned.error
    runner = JobRunner(app, job, [planned])
    try:
        with contextlib.suppress(SystemExit):  # how the runner ends a run that failed; its outcome has the code
            app.run(runner)
    except OSError as error:
        raise ConfigError(f"output_dir: {error}") from error
    return runner.outcomes[-1].exit_code or EXIT_OK


def _run_sweep(app: HydraApp, job: Job) -> int:
    plan = plan_sweep(app)
    errors = [planned.error for planned in plan or () if planned.error is not None]
    if plan is not None and len(errors) == len(plan):
        raise errors[0]
    runner = JobRunner(app, job, plan)
    substitutes = {planned.overrides: planned.substitute for planned in plan or () if planned.substitute is not None}
    code = EXIT_OK
    try:
        app.run_sweep(runner, substitutes)
    except KeyboardInterrupt as error:
        code = exit_code_of(error)
    except Exception as error:
        # a job's error is in its outcome already; Hydra's own is told here
        code = EXIT_FAILED
        if isinstance(error, OSError) and not runner.outcomes:
            raise ConfigError(f"output_dir: {error}") from error
        if all(outcome.cause is not error for outcome in runner.outcomes):
            traceback.print_exception(error)
    report_sweep(runner.outcomes, plan)
    return next((outcome.exit_code for outcome in runner.outcomes if outcome.exit_code), code)


class JobRunner:
    """What Hydra calls for each job: runs it, keeps its outcome, logs its failure where it belongs."""

    def __init__(self, app: HydraApp, job: Job, plan: Sequence[PlannedJob] | None) -> None:
        """`plan` is None when the jobs were not known beforehand: each is then checked when it starts."""
        self._app = app
        self._job = job
        self._plan = None if plan is None else {planned.number: planned for planned in plan}
        self.outcomes: list[Outcome] = []

    def __call__(self, cfg: DictConfig) -> Mapping[str, Any] | None:
        """Run one job in the folder that Hydra made.

        Raises:
            SystemExit: it was a single run and failed; Hydra prints nothing about it.
            BaseException: it was a job of a sweep and failed in it; Hydra goes on, unless interrupted.
        """
        run_dir, place = Path(HydraConfig.get().runtime.output_dir), _place()
        try:
            summary = self._run(cfg, run_dir, place)
        except BaseException as error:
            self.outcomes.append(Outcome(place, run_dir, exit_code_of(error), summary_in(run_dir), error))
            OUTCOME_LOG.error("the job failed", exc_info=error)
            _tell(error, place, run_dir)
            _forget_frames(error)
            if place is None:
                raise SystemExit(exit_code_of(error)) from error
            if error is self._refusal(place):
                return None
            raise
        self.outcomes.append(Outcome(place, run_dir, EXIT_OK, summary))
        return summary

    def _run(self, cfg: DictConfig, run_dir: Path, place: SweepJob | None) -> Mapping[str, Any] | None:
        reset_process_state()
        for warning in self._warnings(cfg, place):
            LOG.warning(warning)
        try:
            return self._job(cfg, run_dir, place)
        except SystemExit as error:
            # Would end the sweep with it.
            raise RuntimeError(f"the job called sys.exit({error.code!r})") from error

    def _warnings(self, cfg: DictConfig, place: SweepJob | None) -> Sequence[str]:
        if self._plan is None:
            return check_inside_job(self._app, cfg)
        if (refusal := self._refusal(place)) is not None:
            raise refusal
        return self._plan[None if place is None else place.number].warnings

    def _refusal(self, place: SweepJob | None) -> ConfigError | None:
        return None if self._plan is None else self._plan[None if place is None else place.number].error


def exit_code_of(error: BaseException) -> int:
    """2 for a bad config, the signal's code for an interruption (130 unless it has its own), else 1."""
    if isinstance(error, KeyboardInterrupt):
        return int(getattr(error, "exit_code", EXIT_INTERRUPTED))
    return EXIT_BAD_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED


def reset_process_state() -> None:
    """Forget what the job before left in this process: Accelerate refuses another precision than the first one's."""
    gc.collect()  # models lie in reference cycles
    if "accelerate.state" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState, PartialState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        PartialState._reset_state()


def _forget_frames(error: BaseException | None) -> None:
    """Let go of the failed job's local variables, models among them: its error is kept until the sweep ends."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _place() -> SweepJob | None:
    settings = HydraConfig.get()
    if settings.mode is None or settings.mode.name != "MULTIRUN":
        return None
    overrides = OmegaConf.to_container(settings.overrides.task)
    assert isinstance(overrides, list)
    return SweepJob(settings.job.num, tuple(map(str, overrides)), Path(os.path.abspath(settings.sweep.dir)))


def _tell(error: BaseException, place: SweepJob | None, run_dir: Path) -> None:
    """The failure on stderr: one line for a bad config, the traceback for anything unexpected, nothing for Ctrl-C."""
    if isinstance(error, ConfigError):
        where = "" if place is None else f"job {place.number}: "
        sys.stderr.write(f"{where}{error}\n")
    elif isinstance(error, Exception):
        traceback.print_exception(error)
        if place is not None:
            sys.stderr.write(f"job {place.number} failed; its log is {run_dir / 'train.log'}\n")
