"""Composing as the command line does, with one Hydra for all tests."""

from functools import lru_cache

from omegaconf import DictConfig

from asynctensorrlhf.composition.hydra_app import HydraApp, parse_arguments
from asynctensorrlhf.composition.paths import conf_dir
from asynctensorrlhf.composition.plan import PlannedJob, plan_job

# what an option cannot do without
REQUIRED = {
    "data=jsonl": ("data.path=x.jsonl",),
    "data=parquet": ("data.path=x.parquet",),
}
# a correction corrects for a proximal policy that is not the sampler
CORRECTED = ("loss=ppo", "loss.proximal=recompute")
GROUP_OPTIONS = sorted(f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml"))
CORRECTIONS = sorted(f"loss/correction={path.stem}" for path in conf_dir().glob("loss/correction/*.yaml"))
OPTIONS = [*GROUP_OPTIONS, *CORRECTIONS]
PRESETS = sorted(path.stem for path in conf_dir().glob("loss/*.yaml"))


@lru_cache(maxsize=8)
def app(*flags: str) -> HydraApp:
    return HydraApp(parse_arguments(flags))


def chosen(option: str) -> tuple[str, ...]:
    """The overrides that choose an option so that it can run."""
    return (*(CORRECTED if option in CORRECTIONS else ()), option, *REQUIRED.get(option, ()))


def plan(*overrides: str, flags: tuple[str, ...] = ()) -> PlannedJob:
    return plan_job(app(*flags), overrides)


def compose(*overrides: str) -> DictConfig:
    return app().compose(overrides)


def complaint(*overrides: str) -> str:
    error = plan(*overrides).error
    assert error is not None, f"accepted {overrides}"
    assert "\n" not in str(error)
    return str(error)
