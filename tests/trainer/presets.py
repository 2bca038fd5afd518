"""The losses and advantages that `atrlhf train` would build, from the option files themselves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from asynctensorrlhf.composition.hydra_app import HydraApp, parse_arguments
from asynctensorrlhf.composition.paths import conf_dir
from asynctensorrlhf.interfaces import Advantage, Loss

PRESETS = sorted(path.stem for path in (conf_dir() / "loss").glob("*.yaml"))


@lru_cache(maxsize=256)
def _composed(*overrides: str) -> DictConfig:
    return HydraApp(parse_arguments([])).compose(list(overrides))


def loss_of(preset: str, *overrides: str) -> Loss:
    """`loss=PRESET` with further overrides."""
    loss: Loss = instantiate(_composed(f"loss={preset}", *overrides).loss)
    return loss


def advantage_of(preset: str, *overrides: str) -> Advantage:
    """The advantage that comes with `loss=PRESET`, or with further overrides."""
    advantage: Advantage = instantiate(_composed(f"loss={preset}", *overrides).advantage)
    return advantage


def objective(preset: str, *overrides: str) -> dict[str, Any]:
    """Loss and advantage, as arguments."""
    return {"loss": loss_of(preset, *overrides), "advantage": advantage_of(preset, *overrides)}
