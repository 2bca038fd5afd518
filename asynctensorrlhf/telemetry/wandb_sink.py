"""The one place that talks to Weights & Biases.

Knows how to start, feed and end a W&B run without ever stopping ours; does not know what is logged.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "disabled"]

_HOSTS = ("api.wandb.ai", "forge.coreweave.com", "api.forge.coreweave.com")
_MODES_OF_ENVIRONMENT: Mapping[str, Mode] = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
_SETTINGS: Mapping[str, Any] = {
    "silent": True,
    "console": "off",
    "init_timeout": 10.0,  # seconds; without a network `init` waits this long before the run goes offline
    "finish_timeout": 120.0,  # seconds; what isn't uploaded by then stays in the run folder
    "disable_git": True,
    "x_disable_meta": True,  # it records the command line, which may hold a secret
    "save_code": False,
}


def resolve_mode(mode: str, environment: Mapping[str, str] = os.environ) -> Mode:
    """What `logger.mode` means here. A mode named in the config wins over WANDB_MODE, which wins over `auto`.

    Args:
        mode: auto, online, offline or disabled; auto is online when there is a key, else offline.
        environment: where WANDB_MODE, WANDB_API_KEY, WANDB_BASE_URL and NETRC are read.

    Raises:
        ValueError: an unknown mode, or online without a key: a login would wait for somebody to type.
    """
    wanted: str = mode
    if mode == "auto":
        from_environment = environment.get("WANDB_MODE", "").lower()
        found = "online" if has_key(environment) else "offline"
        wanted = _MODES_OF_ENVIRONMENT.get(from_environment, found)
        mode = f"auto with WANDB_MODE={from_environment}" if from_environment else mode
    if wanted not in ("online", "offline", "disabled"):
        raise ValueError(f"logger.mode must be one of auto, online, offline, disabled, got {mode!r}")
    if wanted == "online" and not has_key(environment):
        raise ValueError(
            f"logger.mode is {mode} but no W&B key was found: set WANDB_API_KEY, run `wandb login`, "
            "or use logger.mode=offline"
        )
    return cast("Mode", wanted)


def has_key(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a W&B key is in the environment or in netrc; asks neither the network nor the user."""
    if environment.get("WANDB_API_KEY"):
        return True
    own_host = urlsplit(environment.get("WANDB_BASE_URL", "")).netloc
    path = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        known = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    return any(host in known for host in ([own_host] if own_host else _HOSTS))


class WandbSink:
    """One W&B run; its methods let every exception of the package through."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def define_step(self) -> None:
        """Make our step the x axis of every metric."""
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row under our own step."""
        # Not as `log(..., step=step)`: the service drops rows whose step does not rise, and after a resume
        # those are the steps trained again.
        self._run.log({"step": step, **metrics})

    def summary(self, data: Mapping[str, Any]) -> None:
        """Set the run's summary values."""
        self._run.summary.update(dict(data))

    def finish(self, exit_code: int) -> None:
        """End the run as finished (0) or failed."""
        self._run.finish(exit_code=exit_code)


def start_run(
    *,
    mode: Mode,
    folder: Path,
    settings: Mapping[str, Any],
    note: Callable[[str], None],
    warn: Callable[[str], None],
) -> Any | None:
    """A new W&B run, or None when there can be none; never raises, never asks.

    Args:
        mode: where its rows go; `online` becomes offline when the service can't be reached in time.
        folder: W&B's own files are written below it.
        settings: arguments of `wandb.init`: project, name, id, resume, group, config.
        note: takes a line for people.
        warn: takes a line about something that went wrong.
    """
    if mode == "disabled":
        return None
    try:
        import wandb

        # `create_new`: a run that somebody left open in this process stays theirs.
        options = {"dir": str(folder), "reinit": "create_new", "settings": _known_settings(wandb), **settings}
        return _init(wandb, mode, options, note, warn)
    except ModuleNotFoundError as error:
        note(f"W&B is off ({error}): metrics.jsonl has everything")
    except Exception as error:  # noqa: BLE001 - a broken logger must not stop a run
        warn(f"W&B is off: {_first_line(error)}")
    return None


def _init(
    wandb: Any, mode: Mode, options: Mapping[str, Any], note: Callable[[str], None], warn: Callable[[str], None]
) -> Any:
    if mode == "online":
        try:
            run = wandb.init(mode="online", **options)
        except Exception as error:  # noqa: BLE001 - its failures have no common type
            warn(f"W&B can't be reached, the run goes on offline: {_first_line(error)}")
            wandb.teardown()  # the failed attempt would hold the run's id
        else:
            note(f"W&B: {getattr(run, 'url', 'online')}")
            return run
    run = wandb.init(mode="offline", **options)
    note(f"W&B: offline, in {options['dir']}/wandb")
    return run


def _known_settings(wandb: Any) -> dict[str, Any]:
    """Our settings as far as this version has them; an unknown one would be an error."""
    known = getattr(getattr(wandb, "Settings", None), "model_fields", _SETTINGS)
    return {name: value for name, value in _SETTINGS.items() if name in known}


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
