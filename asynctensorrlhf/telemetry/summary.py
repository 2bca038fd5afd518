"""Whole JSON files that are either there and complete or not there.

Knows how to replace a file at once; does not know what a summary holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asynctensorrlhf.telemetry.json_lines import plain


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON in one move: a reader sees the old file or the whole new one, also after a crash.

    Numbers that are not finite become null.

    Raises:
        OSError: the disk refused; an older file stays as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "w", encoding="ascii") as file:
            json.dump(plain(data), file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
