"""Append-only files of one JSON object a line, readable by any JSON parser whatever the rows hold.

Knows how rows reach the disk and what a cut-off row leaves behind; does not know what a row means.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """The same value for JSON: NaN and infinities become None, paths become text, tuples become lists.

    Lone surrogates become U+FFFD: strict parsers refuse a file that holds one, even escaped.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str(value) if isinstance(value, os.PathLike) else value


_ENCODER = json.JSONEncoder(allow_nan=False)


def _encode(row: Mapping[str, Any]) -> str:
    """`plain` visits every item in Python, so only rows that need it pay for it: those with NaN or surrogates."""
    try:
        line = _ENCODER.encode(row)
    except ValueError:
        return _ENCODER.encode(plain(row))
    return _ENCODER.encode(plain(row)) if r"\ud" in line else line


class JsonLines:
    """Rows appended to one file; a row is with the operating system when `append` returns.

    So a killed process loses no row (a power cut may). The file is pure ASCII: no text a model can write
    (U+2028, NUL, emoji) breaks a line, and it reads the same under every locale.
    """

    def __init__(self, path: Path) -> None:
        # Unbuffered: buffered bytes of a row that failed would be written again after the disk has recovered.
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed in `close`
        self._end_torn_row()

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write all rows or none.

        Raises:
            OSError: the disk refused; the file is as it was before.
        """
        lines = "".join(_encode(row) + "\n" for row in rows).encode("ascii")
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(lines) != len(lines):
                raise OSError("no space left for the whole row")
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """No more rows."""
        self._file.close()

    def _end_torn_row(self) -> None:
        """A row that a killed writer left without its newline must not swallow the next one."""
        if not self._file.seek(0, os.SEEK_END):
            return
        self._file.seek(-1, os.SEEK_END)
        if self._file.read(1) != b"\n":
            self._file.write(b"\n")
