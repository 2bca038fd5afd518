"""Loss and advantage, built while a config is checked: they hold no weight, and their constructors refuse values.

Knows how a refusal of theirs is told; does not know what they compute.
"""

from __future__ import annotations

import importlib
import warnings
from contextlib import suppress

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from asynctensorrlhf.composition.errors import ConfigError

PURE_GROUPS = ("loss", "advantage")


def check_pure_parts(cfg: DictConfig) -> list[str]:
    """Build what needs no weight, and let go of it.

    A constructor that fails with anything but ValueError has a bug: the job, which builds it again, shows where.

    Args:
        cfg: a composed config whose values satisfy their rules.

    Returns:
        What the constructors warn of.

    Raises:
        ConfigError: what they refuse, or an object that can't be found.
    """
    return [warning for group in PURE_GROUPS for warning in _built(cfg, group)]


def _built(cfg: DictConfig, group: str) -> list[str]:
    target = str(cfg[group].get("_target_"))
    with suppress(ImportError):
        # what a module warns of while it is imported is not about the config
        importlib.import_module(target.rpartition(".")[0] or target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            instantiate(cfg[group])
        except InstantiationException as error:
            _tell(error, group, target)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


def _tell(error: InstantiationException, group: str, target: str) -> None:
    if isinstance(error.__cause__, ImportError):
        reason = str(error.__cause__).replace("\n", " ")
        raise ConfigError(f"{group}._target_={target}: cannot be found: {reason}") from error
    if isinstance(error.__cause__, ValueError):
        raise ConfigError(str(error.__cause__)) from error
