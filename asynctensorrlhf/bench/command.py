"""`atrlhf bench NAME key=value ...`: which measurement, with which settings.

Knows names and the types of keys; a measurement imports what it needs when it runs.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from asynctensorrlhf.bench.losses import losses
from asynctensorrlhf.composition.errors import ConfigError, suggestion

BENCHES: Mapping[str, Callable[..., None]] = {"losses": losses}
"""Name to function: keyword-only arguments with defaults, each an int, a float or a str; its docstring is its help."""

EXIT_BAD_COMMAND = 2
WIDTH = 110
USAGE = "usage: atrlhf bench NAME [key=value ...]"


def run(argv: Sequence[str]) -> int:
    """Run what the arguments of `atrlhf bench` ask for.

    Returns:
        Exit code: 0, or 2 for a bad name, key or value, with one line on stderr.
    """
    if not argv or {"--help", "-h"} & set(argv):
        sys.stdout.write(_help())
        return 0
    name, *settings = argv
    try:
        if name not in BENCHES:
            raise ConfigError(f"bench {name}: must be one of {', '.join(BENCHES)}{suggestion(name, BENCHES)}")
        BENCHES[name](**_parse(BENCHES[name], settings))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_BAD_COMMAND
    return 0


def _parse(bench: Callable[..., None], settings: Sequence[str]) -> dict[str, Any]:
    kinds = _kinds(bench)
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if key not in kinds:
            raise ConfigError(f"{setting}: unknown key{suggestion(key, kinds) or '; one of ' + ', '.join(kinds)}")
        if not equals or key in values:
            raise ConfigError(f"{setting}: must be {key}=VALUE, once")
        try:
            values[key] = kinds[key](text)
        except ValueError as error:
            raise ConfigError(f"{setting}: must be {_A[kinds[key]]}") from error
    return values


_A: Mapping[type, str] = {int: "an int", float: "a float", str: "a text"}


def _kinds(bench: Callable[..., None]) -> dict[str, type]:
    return {key: kind for key, kind in get_type_hints(bench).items() if key != "return"}


def _help() -> str:
    parts = ["atrlhf bench: measurements of this machine, as a table and as result.json.", "", USAGE, ""]
    for name, bench in BENCHES.items():
        doc = inspect.getdoc(bench) or ""
        about = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", doc, flags=re.MULTILINE))
        parts.append(f"  {name:<10}{doc.splitlines()[0]}")
        for key, parameter in inspect.signature(bench).parameters.items():
            parts.append(f"    {key}={parameter.default}")
            text = " ".join(about[key].split())
            parts.append(textwrap.fill(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8))
        parts.append("")
    return "\n".join(parts)
