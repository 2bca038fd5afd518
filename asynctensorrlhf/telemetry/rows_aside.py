"""What a resumed run does with the rows its crashed predecessor wrote past the restored checkpoint.

Knows rows by their `step` only; does not know what else they hold.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path


def move_rows_aside(path: Path, last_step: int) -> Path | None:
    """Move rows with `step > last_step`, and rows cut off by a crash, out of a JSON-lines file.

    They go to `<stem>.after_step_<last_step><suffix>` beside it, or to the first free one of
    `<stem>.after_step_<last_step>.2<suffix>`, `.3`, ...: nothing is overwritten, two crashes never mix.
    A crash in here loses no row either: at worst the same rows are moved again, to the next free name.

    Args:
        path: a file written by `JsonLines`; it need not exist.
        last_step: the last step the restored checkpoint contains.

    Returns:
        The file that took the rows, None when there were none.
    """
    if not path.exists():
        return None
    kept, moved = path.with_name(path.name + ".kept"), path.with_name(path.name + ".moved")
    with open(path, "rb") as rows, open(kept, "wb") as kept_file, open(moved, "wb") as moved_file:
        for row in rows:
            target = kept_file if _belongs(row, last_step) else moved_file
            target.write(row.rstrip(b"\r\n") + b"\n")
        for file in (kept_file, moved_file):
            file.flush()
            os.fsync(file.fileno())
    aside = _free_name(path, last_step) if moved.stat().st_size else None
    if aside is None:
        moved.unlink()
    else:
        os.replace(moved, aside)
    os.replace(kept, path)
    return aside


def _belongs(row: bytes, last_step: int) -> bool:
    try:
        record = json.loads(row)
    except ValueError:  # torn, or the NULs a file system leaves after a power cut
        return False
    step = record.get("step") if isinstance(record, dict) else None
    return isinstance(step, int) and step <= last_step


def _free_name(path: Path, last_step: int) -> Path:
    first = path.with_name(f"{path.stem}.after_step_{last_step}{path.suffix}")
    others = (first.with_name(f"{first.stem}.{number}{path.suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([first], others) if not name.exists())
