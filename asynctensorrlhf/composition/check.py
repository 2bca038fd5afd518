"""Whether a composed config can run: names, types, ranges, interpolations, and combinations.

Knows the composed config and its schema; does not know how it was composed. Loads no weight; torch is imported only
for a config whose every value satisfies its rule.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asynctensorrlhf.composition.cross_checks import CHECKS
from asynctensorrlhf.composition.errors import ConfigError, show_value, suggestion
from asynctensorrlhf.composition.loss_checks import LOSS_CHECKS
from asynctensorrlhf.composition.pure_parts import check_pure_parts
from asynctensorrlhf.composition.schema import Knob, Schema
from asynctensorrlhf.composition.secret_keys import refuse_secrets_in
from asynctensorrlhf.composition.values import Values

ESCAPE_ADVICE = r"a literal ${ is written \${"
FREE_TEXT = ("template",)


def check_composition(cfg: DictConfig, schema: Schema) -> list[str]:
    """Check a composed config, without Hydra's own node.

    Args:
        cfg: what the job would be run with; interpolations into `hydra` must be resolvable.
        schema: of the options it was composed from.

    Returns:
        One-line warnings about values that are allowed and probably not meant.

    Raises:
        ConfigError: the first thing wrong, in one line.
    """
    raw = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(raw, dict)
    refuse_secrets_in(raw)
    _refuse_unknown(raw, "", schema)
    _refuse_absent(raw, schema)
    plain = _checked_values(cfg, "", schema)
    declared = {path: knob.declared for path, knob in schema.knobs.items()}
    values = Values(plain, raw_output_dir=str(raw["output_dir"]), declared=declared)
    warnings = [warning for check in (*CHECKS, *LOSS_CHECKS) if (warning := check(values)) is not None]
    return warnings + check_pure_parts(cfg)


def resolved_config(cfg: DictConfig) -> dict[str, Any]:
    """Plain data for files and trackers: resolved, but what came from the environment stays unresolved.

    A value that only refers to such a value shows the reference too, so nothing of the environment gets through.
    """
    shareable = copy.deepcopy(cfg)
    OmegaConf.set_readonly(shareable, False)
    for node, key, text in _strings(shareable):
        if "${oc.env:" in text:
            node[key] = text.replace("${", r"\${")
    plain = OmegaConf.to_container(shareable, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _strings(node: Any) -> Iterator[tuple[Any, Any, str]]:
    raw: Any = OmegaConf.to_container(node, resolve=False)
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        if isinstance(value, str):
            yield node, key, value
        elif isinstance(value, (dict, list)):
            yield from _strings(node[key])


def _refuse_unknown(raw: dict[Any, Any], above: str, schema: Schema) -> None:
    for key, value in raw.items():
        path = f"{above}.{key}" if above else str(key)
        if isinstance(value, dict) and value and not (path in schema.knobs and not schema.is_branch(path)):
            _refuse_unknown(value, path, schema)
        elif not schema.knows(path):
            raise ConfigError(f"{path}={show_value(value)}: {unknown_key(path, schema)}")
        elif schema.is_branch(path) and not isinstance(value, dict):
            raise ConfigError(f"{path}={show_value(value)}: {_value_of_a_branch(path, value, schema)}")


def _value_of_a_branch(path: str, value: Any, schema: Schema) -> str:
    """What is wrong with a value where keys should be, and how an option of a nested group is chosen."""
    if path in schema.groups | schema.nested:
        option = value if isinstance(value, str) else "OPTION"
        return f"is a group, whose options are chosen otherwise; use {path.replace('.', '/')}={option}"
    inner = next(known for known in schema.knobs if known.startswith(f"{path}.") and "._" not in known)
    return f"holds keys of its own, such as {inner}"


def unknown_key(path: str, schema: Schema) -> str:
    """What is wrong with a key that the composition does not have, and the nearest that it has."""
    candidates = [known for known in schema.knobs if "._" not in known]
    above = path.rpartition(".")[0]
    siblings = ", ".join(known for known in candidates if above and known.rpartition(".")[0] == above)
    if above in schema.nested and not siblings:
        return f"the chosen option has no keys; another one is chosen by {above.replace('.', '/')}=OPTION"
    if "." not in path:
        candidates.extend(schema.groups | {group.replace(".", "/") for group in schema.nested})
    if found := suggestion(path, candidates):
        return f"unknown key{found}"
    return f"unknown key; must be one of {siblings}" if siblings else "unknown key; `atrlhf train --help` lists them"


def _refuse_absent(raw: dict[Any, Any], schema: Schema) -> None:
    for group in sorted(schema.groups | schema.nested):
        if not _holds(raw, group):
            name = group.replace(".", "/")
            raise ConfigError(f"{name}: is missing; a run needs an option of every group, as in {name}=OPTION")
    for path, knob in schema.knobs.items():
        if not _holds(raw, path):
            raise ConfigError(f"{path}: is missing; must be {knob.rule.allowed or 'given'}")


def _holds(raw: dict[Any, Any], path: str) -> bool:
    node: Any = raw
    for part in path.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _checked_values(node: DictConfig, above: str, schema: Schema) -> dict[str, Any]:
    """Resolved plain values of a branch, each satisfying its rule."""
    values: dict[str, Any] = {}
    for key, name in ((key, str(key)) for key in node):
        path = f"{above}.{name}" if above else name
        if schema.is_branch(path):
            values[name] = _checked_values(node[key], path, schema)
        elif path in schema.knobs:
            values[name] = _checked_value(node, key, schema.knobs[path])
    return values


def _checked_value(node: DictConfig, key: Any, knob: Knob) -> Any:
    allowed = f"must be {knob.rule.allowed or 'given'}"
    if OmegaConf.is_missing(node, key):
        raise ConfigError(f"{knob.path}=???: is required; {allowed}. {knob.description}")
    value = _resolved(node, key, knob.path)
    if not knob.rule.allows(value):
        is_text_wanted = "str" in knob.rule.text.split() and isinstance(value, (bool, int, float))
        advice = f", got the {type(value).__name__} {_shown(node, key, value)}; quote it twice: '{knob.path}=\"...\"'"
        raise ConfigError(f"{knob.path}={_shown(node, key, value)}: {allowed}{advice if is_text_wanted else ''}")
    return value


def _shown(node: DictConfig, key: Any, value: Any) -> str:
    """The value for a message; what comes from the environment is shown as it is written."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    return show_value(raw[key] if OmegaConf.is_interpolation(node, key) else value)


def _resolved(node: DictConfig, key: Any, path: str) -> Any:
    """The plain value of a key, its interpolations resolved."""
    raw: Any = OmegaConf.to_container(node, resolve=False)
    text = raw[key]
    if path.rpartition(".")[2] in FREE_TEXT and isinstance(text, str) and _is_mixed(text):
        raise ConfigError(f"{path}={show_value(text)}: a text must not refer to other keys; {ESCAPE_ADVICE}")
    try:
        value = node[key]
        if isinstance(value, Container):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}={show_value(text)}: {reason}; {ESCAPE_ADVICE}") from error
    return value


def _is_mixed(text: str) -> bool:
    """Whether an interpolation stands among other characters, where it would be taken for text."""
    return "${" in text.replace(r"\${", "") and re.fullmatch(r"\$\{[^{}]*\}", text) is None
