"""Composing, expanding and running with Hydra.

The one file that knows Hydra's internals; knows neither what is checked nor what a job does.
"""

from __future__ import annotations

import copy
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from asynctensorrlhf.composition.errors import ConfigError, suggestion
from asynctensorrlhf.composition.paths import PRIMARY, conf_dir
from asynctensorrlhf.composition.schema import ConfigFile, Schema

# What composing raises for bad input. KeyError: a variable of `hydra.job.env_copy` that is not set.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, KeyError)

OverrideList = tuple[str, ...]
_BASIC_SWEEPER = f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"


def parse_arguments(argv: Sequence[str]) -> Namespace:
    """Hydra's own command line; flags and overrides in any order.

    Raises:
        ConfigError: a flag that Hydra does not have, or one that this program does not pass on.
    """
    parser = _Arguments(add_help=False, parents=[get_args_parser()])
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"{unknown[0]}: unknown flag{suggestion(unknown[0], flags)}")
    if args.experimental_rerun is not None:
        raise ConfigError("--experimental-rerun: not supported; go on with output_dir=<folder> resume=auto")
    if args.config_path is not None:
        args.config_path = os.path.abspath(args.config_path)
    return args


class _Arguments(ArgumentParser):
    """Hydra's parser with errors of one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


class HydraApp:
    """Hydra over the shipped config and whatever `--config-dir`, `--config-path` and `--config-name` add."""

    def __init__(self, args: Namespace) -> None:
        version.setbase("1.3")
        self.args = args
        self.config_name: str = args.config_name or PRIMARY
        self.config_path: str = args.config_path or str(conf_dir())
        self._loader = _SweepLoader(_search_path(self.config_path, args.config_dir))
        self._hydra = Hydra(task_name=PRIMARY, config_loader=self._loader)
        self._parser = OverridesParser.create(config_loader=self._loader)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Overrides in Hydra's grammar; raises HydraException."""
        return list(self._parser.parse_overrides(list(overrides)))

    def options(self, group: str) -> list[str]:
        """Option names of a group; none when there is no such group."""
        hydra_overrides = [text for text in self.args.overrides if text.startswith("hydra.searchpath=")]
        return list(self._loader.get_group_options(group, config_name=self.config_name, overrides=hydra_overrides))

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """One job's config, Hydra's node included; raises HydraException or OmegaConfBaseException."""
        return self._hydra.compose_config(self.config_name, list(overrides), RunMode.RUN)

    def compose_sweep(self, overrides: Sequence[str]) -> DictConfig:
        """What a sweep as a whole is composed of, as Hydra itself does before it expands the jobs."""
        return self._hydra.compose_config(self.config_name, list(overrides), RunMode.MULTIRUN)

    def schema(self, overrides: Sequence[str], cfg: DictConfig) -> Schema:
        """Rules of the files that these overrides choose; `cfg` (with Hydra's node) says where they are found."""
        defaults = self._loader.compute_defaults_list(self.config_name, list(overrides), RunMode.RUN).defaults
        chosen = [(entry.config_path, entry.package or "") for entry in defaults if entry.config_path is not None]
        sources = cfg.hydra.runtime.config_sources
        return Schema.from_files(
            ConfigFile(text, package) for path, package in chosen if (text := _text_of(path, sources)) is not None
        )

    def is_sweep(self) -> bool:
        """Whether several jobs were asked for, on the command line or by `hydra.mode`."""
        return bool(self.args.multirun) or self._own_settings().hydra.mode == RunMode.MULTIRUN

    def jobs(self) -> list[OverrideList] | None:
        """The overrides of each job of a sweep, in order; None when a sweeper of the user's choice decides on them."""
        sweeper = self._own_settings().hydra.sweeper
        if sweeper._target_ != _BASIC_SWEEPER:
            return None
        params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
        task = [override for override in self.parse(self.args.overrides) if not override.is_hydra_override()]
        batches = BasicSweeper.split_arguments(self.parse(params) + task, None)
        return [tuple(job) for job in batches[0]]

    def hydra_overrides(self) -> list[str]:
        """The overrides of Hydra's own settings, which all jobs of a sweep share."""
        return [text for text in self.args.overrides if text.startswith(("hydra.", "hydra/", "+hydra.", "++hydra."))]

    def run(self, task: Callable[[DictConfig], Any]) -> None:
        """Run the one job. Errors of the job pass through."""
        with _global(self._hydra):
            self._hydra.run(self.config_name, task, [*self.args.overrides, "hydra.mode=RUN"])

    def run_sweep(self, task: Callable[[DictConfig], Any], substitutes: Mapping[OverrideList, OverrideList]) -> None:
        """Run every job; raises the first failing job's error at the end.

        Args:
            task: the job.
            substitutes: for overrides that can't be composed: those to compose instead, so that the job has a folder.
        """
        self._loader.substitutes = substitutes
        with _global(self._hydra):
            self._hydra.multirun(self.config_name, task, [*self._composable_arguments(), "hydra.mode=MULTIRUN"])

    def inspect(self) -> None:
        """Leave `--cfg`, `--info`, `--hydra-help` and the like to Hydra; they print and may raise SystemExit."""
        parser: ArgumentParser = get_args_parser()
        _run_hydra(self.args, parser, lambda cfg: None, self.config_path, self.config_name)

    def _own_settings(self) -> DictConfig:
        return self._hydra.compose_config(self.config_name, self.hydra_overrides(), RunMode.RUN)

    def _composable_arguments(self) -> list[str]:
        """The arguments, so written that Hydra can compose the sweep as a whole.

        Hydra applies all that is not swept to the default options first: `loss=ppo,grpo loss.aggregation=token_sum`
        would fail on a default loss without that key. A sweep over one value says the same and is left out there.
        """
        try:
            self.compose_sweep(self.args.overrides)
        except COMPOSE_ERRORS:
            return [self._as_sweep(override) for override in self.parse(self.args.overrides)]
        return list(self.args.overrides)

    def _as_sweep(self, override: Override) -> str:
        text = str(override.input_line)
        is_fixed = override.is_sweep_override() or override.is_delete() or override.is_hydra_override()
        if is_fixed or override.key_or_group == "output_dir":
            return text
        return f"{override.get_key_element()}=choice({override.get_value_string()})"


class _SweepLoader(ConfigLoaderImpl):
    """Composes a job of a sweep from its substitute where it has one."""

    substitutes: Mapping[OverrideList, OverrideList] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        chosen = self.substitutes.get(tuple(sweep_overrides), sweep_overrides)
        return super().load_sweep_config(master_config, list(chosen))


@contextmanager
def as_in_the_job(cfg: DictConfig, job_number: int | None) -> Iterator[Path]:
    """Make `${hydra:...}` resolvable as it will be inside the job; yields the job's folder."""
    before = HydraConfig.instance().cfg
    with open_dict(cfg.hydra):
        folder = Path(str(cfg.hydra.run.dir))
        if job_number is not None:
            cfg.hydra.job.num, cfg.hydra.job.id = job_number, str(job_number)
            folder = Path(str(cfg.hydra.sweep.dir)) / str(cfg.hydra.sweep.subdir)
        cfg.hydra.runtime.output_dir = str(folder.absolute())
    HydraConfig.instance().set_config(cfg)
    try:
        yield folder
    finally:
        HydraConfig.instance().cfg = before


def own_keys(cfg: DictConfig) -> DictConfig:
    """A copy without Hydra's node, as the job gets it."""
    own = copy.deepcopy(cfg)
    with read_write(own), open_dict(own):
        del own["hydra"]
    return own


@contextmanager
def _global(hydra: Hydra) -> Iterator[None]:
    """Plugins and jobs find Hydra where `hydra.main` would have put it; its own errors are raised, not printed."""
    GlobalHydra.instance().clear()
    GlobalHydra.instance().initialize(hydra)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def _search_path(config_path: str, config_dir: str | None) -> ConfigSearchPath:
    search_path = create_config_search_path(config_path)
    if config_dir is not None:
        folder = Path(config_dir).absolute()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: no such folder")
        search_path.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
    return search_path


def _text_of(config_path: str, sources: Sequence[Any]) -> str | None:
    """The text of an option's file, from the first place on Hydra's search path that has it; None for Hydra's own."""
    for source in sources:
        if source.provider != "hydra" and source.schema in ("file", "pkg"):
            name = f"{config_path}.yaml"
            place = Path(source.path) / name if source.schema == "file" else _packaged(source.path, name)
            if place.is_file():
                return place.read_text(encoding="utf-8")
    return None


def _packaged(package: str, name: str) -> Any:
    return files(package).joinpath(*name.split("/"))
