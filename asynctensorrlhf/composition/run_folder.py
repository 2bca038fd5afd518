"""A run's folder: taken by one run, and what was asked for written into it.

Knows the config file in it; does not know what else a run writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import yaml
from omegaconf import DictConfig

from asynctensorrlhf.composition.check import resolved_config
from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.telemetry.masking import masked


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Hold the folder for this process while inside; the system lets go of it however the process ends (POSIX).

    Raises:
        ConfigError: another process runs in it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / ".lock").open("w") as file:
        if os.name == "posix":
            _lock(file, run_dir)
        yield


def _lock(file: IO[str], run_dir: Path) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            f"output_dir={run_dir}: another process is running in it; wait for it or choose another folder"
        ) from error


def claim(run_dir: Path, cfg: DictConfig, *, is_resumed: bool) -> dict[str, Any]:
    """Write the config into the folder and return it as plain data; only one run can do so.

    A resumed run leaves `config.yaml` as it is and writes its own beside it.

    Raises:
        ConfigError: another run has claimed the folder.
    """
    config = masked(resolved_config(cfg))
    # not by OmegaConf: it would read a text like `a ${ b` as a broken reference
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    path = run_dir / "config.yaml"
    if is_resumed and path.exists():
        path = _free_name(run_dir)
    try:
        # exclusive creation is what makes the claim: of two runs that start at once, one fails here
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"output_dir={run_dir}: already holds a run; add resume=auto to go on, or choose another folder"
        ) from error
    return config


def _free_name(run_dir: Path) -> Path:
    taken = sum(1 for _ in run_dir.glob("config.resumed_*.yaml"))
    return run_dir / f"config.resumed_{taken + 1}.yaml"
