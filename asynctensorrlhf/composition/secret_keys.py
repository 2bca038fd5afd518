"""Which keys hold a secret, and the refusal to write one into a run folder.

Knows names only; never looks at a value, so no message can repeat one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asynctensorrlhf.composition.errors import ConfigError

_SECRET = re.compile(r"(?:.*[_-])?(?:api)?(?:key|token|password|passwd|secret|credentials?)", re.IGNORECASE)
_SPECIAL_TOKENS = frozenset(f"{name}_token" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop"))


def refuse_secret(path: str) -> None:
    """Refuse a dotted key whose last part names a secret.

    Raises:
        ConfigError: advises the environment; holds no value.
    """
    last = path.rpartition(".")[2]
    if _SECRET.fullmatch(last) and last not in _SPECIAL_TOKENS:
        raise ConfigError(
            f"{path}: looks like a secret, and the config is written into the run's folder; "
            "set it in the environment instead (for W&B: WANDB_API_KEY)"
        )


def refuse_secrets_of(overrides: Iterable[str]) -> None:
    """Refuse overrides that name a secret, before anything parses or writes them."""
    for override in overrides:
        key, _, value = override.partition("=")
        key = key.lstrip("+~")
        refuse_secret(key)
        for name in re.findall(r"[{,]\s*['\"]?([\w.-]+)['\"]?\s*:", value):
            refuse_secret(f"{key}.{name}")


def refuse_secrets_in(values: Mapping[Any, Any]) -> None:
    """Refuse plain config data that holds such a key at any depth."""
    for path in _key_paths(values, ""):
        refuse_secret(path)


def _key_paths(values: Any, above: str) -> Iterator[str]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        path = f"{above}.{key}" if above else str(key)
        yield path
        yield from _key_paths(value, path)
