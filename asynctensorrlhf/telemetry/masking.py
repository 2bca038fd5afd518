"""Secrets kept out of what is written down for others to read.

Knows what a secret looks like; does not know where the config goes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

_MASK = "***"
_SECRET_NAME = re.compile(r"(^|[_.-])(key|apikey|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
_SHORTEST_SECRET = 8


def masked(config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """A copy of resolved data, plain down to its leaves, with secrets replaced by `***`.

    Masked are values whose key ends in key, token, password, secret or credential (`api_key`, not
    `stop_token_ids`), and, within any text, the value of an environment variable of such a name: an
    interpolation may have copied it.

    Args:
        config: nested mappings and lists.
        environment: variables to look for.
    """
    known = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    secrets = sorted((value for value in known if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)
    return {str(key): _masked_item(str(key), value, secrets) for key, value in config.items()}


def _masked_item(key: str, value: Any, secrets: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _masked_item(str(name), item, secrets) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked_item(key, item, secrets) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if _SECRET_NAME.search(key):
        return _MASK
    return value if isinstance(value, (int, float)) else _without(str(value), secrets)


def _without(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, _MASK)
    return text
