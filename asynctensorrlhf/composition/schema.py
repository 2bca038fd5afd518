"""Every key that a composition may hold, with its rule, read from the YAML files themselves.

Knows the comment above a key; does not know which files a command line chooses, nor the values it sets.

    # Samples per prompt. [int >= 1]
    group_size: 8
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from asynctensorrlhf.composition.paths import PRIMARY, conf_dir
from asynctensorrlhf.composition.rules import ANYTHING, Rule, parse_rule, rule_of_default


class ConfigFile(NamedTuple):
    """The text of an option's file and the dotted path at which Hydra puts its keys."""

    text: str
    package: str


@dataclass(frozen=True)
class Knob:
    """One key.

    Attributes:
        path: dotted, from the root.
        default: plain value in its file; interpolations and `???` as they are written.
        declared: the default in the file that spells the rule, below what a preset makes of it.
        rule: from its comment, else the type of its default.
        has_own_rule: whether a comment spells it.
        description: the comment without the rule.
    """

    path: str
    default: Any
    declared: Any
    rule: Rule
    has_own_rule: bool
    description: str


@dataclass(frozen=True)
class Schema:
    """The keys of one composition.

    Attributes:
        knobs: by dotted path.
        groups: config groups that every composition must choose an option of.
        nested: groups within the chosen options, dotted: `loss.correction` is chosen by `loss/correction=OPTION`.
    """

    knobs: Mapping[str, Knob]
    groups: frozenset[str]
    nested: frozenset[str] = frozenset()

    @classmethod
    def from_files(cls, files: Iterable[ConfigFile]) -> Schema:
        """The shipped root keys and what the chosen options declare; experiments declare nothing."""
        primary, groups = _primary()
        knobs, nested = dict(primary), set[str]()
        for text, package in files:
            if package.partition(".")[0] in groups:
                nested.update(_nested_groups(text, package))
                for knob in _knobs_of(text, package):
                    knobs[knob.path] = _inherit(knob, knobs.get(knob.path))
        return cls(knobs=knobs, groups=groups, nested=frozenset(nested))

    def knows(self, path: str) -> bool:
        """Whether the key is declared, holds declared keys, or lies in a mapping with free keys."""
        if path in self.groups or path in self.knobs:
            return True
        return self.is_branch(path) or self.is_free(path)

    def is_free(self, path: str) -> bool:
        """Whether the key lies in a mapping that takes any."""
        return any(self._is_mapping(parent) for parent in _parents(path))

    def is_branch(self, path: str) -> bool:
        """Whether declared keys lie below."""
        return any(known.startswith(f"{path}.") for known in self.knobs)

    def _is_mapping(self, path: str) -> bool:
        return path in self.knobs and self.knobs[path].rule.kind == "mapping"


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _inherit(knob: Knob, earlier: Knob | None) -> Knob:
    if earlier is None or not earlier.has_own_rule or knob.has_own_rule:
        return knob
    return replace(earlier, default=knob.default)


def _nested_groups(text: str, package: str) -> Iterator[str]:
    """Groups that an option's defaults list chooses within the option: no absolute one, none put elsewhere."""
    for entry in (yaml.safe_load(text) or {}).get("defaults", ()):
        for key in entry if isinstance(entry, dict) else ():
            group = key.rpartition(" ")[2]
            if not group.startswith("/") and "@" not in group:
                yield f"{package}.{group.replace('/', '.')}"


@lru_cache(maxsize=1)
def _primary() -> tuple[dict[str, Knob], frozenset[str]]:
    text = (conf_dir() / f"{PRIMARY}.yaml").read_text(encoding="utf-8")
    choices = [item for entry in yaml.safe_load(text)["defaults"] if isinstance(entry, dict) for item in entry.items()]
    groups = frozenset(group for group, name in choices if name is not None and " " not in group)
    return {knob.path: knob for knob in _knobs_of(text, "") if not knob.path.startswith("hydra.")}, groups


@lru_cache(maxsize=256)
def _knobs_of(text: str, package: str) -> tuple[Knob, ...]:
    comments = dict(_comments(text))
    values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return tuple(
        _knob(".".join((package, *path)) if package else ".".join(path), value, comments.get(path, ""))
        for path, value in _leaves(values, comments, ())
    )


def _leaves(
    values: Mapping[Any, Any], comments: Mapping[tuple[str, ...], str], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        path = (*above, str(key))
        has_rule = _split_comment(comments.get(path, ""))[0] is not None
        if isinstance(value, dict) and value and not has_rule:
            yield from _leaves(value, comments, path)
        else:
            yield path, value


def _knob(path: str, default: Any, comment: str) -> Knob:
    rule, description = _split_comment(comment)
    own = rule or _implied_rule(default)
    return Knob(
        path=path,
        default=default,
        declared=default,
        rule=own,
        has_own_rule=rule is not None,
        description=description,
    )


def _implied_rule(default: Any) -> Rule:
    if isinstance(default, str) and (default == "???" or "${" in default):
        return ANYTHING
    return rule_of_default(default)


def _comments(text: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """The comment lines directly above each key, joined, by the key's path in the file."""
    lines = text.splitlines()
    for path, line in _key_lines(yaml.compose(text), ()):
        first = line
        while first > 0 and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        yield path, " ".join(part.strip().lstrip("# ") for part in lines[first:line])


def _key_lines(node: yaml.Node | None, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = (*above, str(key.value))
            yield path, key.start_mark.line
            yield from _key_lines(value, path)


def _split_comment(comment: str) -> tuple[Rule | None, str]:
    """The rule that ends a comment, if one does, and the text before it."""
    comment = comment.rstrip()
    start = _opening_bracket(comment)
    rule = parse_rule(comment[start + 1 : -1]) if start is not None else None
    return rule, comment[:start].rstrip() if rule is not None else comment


def _opening_bracket(comment: str) -> int | None:
    """Where the bracket that the last character closes was opened; intervals like `[0, 1)` lie within."""
    depth = 0
    if comment.endswith("]"):
        for place in range(len(comment) - 1, -1, -1):
            depth += (comment[place] in "])") - (comment[place] in "[(")
            if depth == 0:
                return place
    return None
