"""`atrlhf train --help`: groups with their options, and every key of the chosen options.

Knows how the schema is shown; the text itself is in the comments of conf/*.yaml.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby

from asynctensorrlhf.composition.errors import show_value
from asynctensorrlhf.composition.faults import find_fault
from asynctensorrlhf.composition.hydra_app import COMPOSE_ERRORS, HydraApp
from asynctensorrlhf.composition.schema import Knob

WIDTH = 110
INTRO = """\
atrlhf train: make a language model better at a task whose answers can be checked, generating and training at once.

usage: atrlhf train [group=option ...] [key=value ...]
       atrlhf train -m key=value1,value2 ...     one job per combination
"""
EXAMPLES = """\
Examples:
  atrlhf train                                                  the default job: sums on a tiny model
  atrlhf train loss=m2po buffer=versioned buffer.max_staleness=4
  atrlhf train loss=grpo loss.kl_coef=0.04                      one of the named losses, with KL to a reference
  atrlhf train loss=ppo loss.proximal=recompute loss/correction=tis    each stage of a loss by itself
  atrlhf train -m loss=ppo,m2po,grpo                            one run, folder and log per job, one table
  atrlhf train experiment=phase1_sync                           the synchronous baseline
  atrlhf train model.path=FOLDER data=jsonl data.path=my.jsonl reward=token_match
  atrlhf train output_dir=runs/a resume=auto                    go on after a crash
  atrlhf train dry_run=true                                     check, load data, print the first prompt, stop

Flags:
  --cfg job                 print the composed config and stop
  --config-dir FOLDER       a folder with option files of your own
  --multirun, -m            run one job per combination of comma-separated values
  --hydra-help              Hydra's own flags
"""


def help_text(app: HydraApp) -> str:
    """The help of the composition that the command line asks for.

    Raises:
        ConfigError: the command line can't be composed.
    """
    overrides = app.args.overrides
    try:
        cfg = app.compose(overrides)
    except COMPOSE_ERRORS as error:
        raise find_fault(app, error, overrides)[0] from error
    schema = app.schema(overrides, cfg)
    choices = {group: choice for group, choice in cfg.hydra.runtime.choices.items() if not group.startswith("hydra/")}
    knobs = [knob for knob in schema.knobs.values() if not knob.path.rpartition(".")[2].startswith("_")]
    parts = (INTRO, "\n".join(_group_lines(app, choices)), "\n".join(_knob_lines(knobs)), EXAMPLES)
    return "\n".join(parts)


def _group_lines(app: HydraApp, choices: dict[str, str | None]) -> Iterator[str]:
    yield "Groups (* = chosen):"
    width = 2 + max(map(len, choices))
    for group in sorted(choices):
        options = (f"{option}*" if option == choices[group] else option for option in app.options(group))
        yield textwrap.fill(
            f"{group:<{width}}{', '.join(options)}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * (width + 2),
            break_on_hyphens=False,
        )
    yield ""


def _knob_lines(knobs: list[Knob]) -> Iterator[str]:
    yield "Keys with their defaults:"
    places = {group: place for place, group in enumerate(dict.fromkeys(map(_group_of, knobs)))}
    for group, members in groupby(sorted(knobs, key=lambda knob: _place_of(knob, places)), _group_of):
        yield f"  {group or 'run'}"
        for knob in members:
            yield f"    {knob.path}={show_value(knob.default)}"
            about = f"{knob.description} [{knob.rule.text}]" if knob.rule.text else knob.description
            yield textwrap.fill(about, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
    yield ""


def _place_of(knob: Knob, places: Mapping[str, int]) -> tuple[bool, int, str]:
    """The run's own keys first; then the groups in order, each followed by the nodes within it."""
    group = _group_of(knob)
    return group != "", places.get(group.partition(".")[0], len(places)), group


def _group_of(knob: Knob) -> str:
    return knob.path.rpartition(".")[0]
