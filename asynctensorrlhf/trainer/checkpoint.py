"""Checkpoints: written whole or not at all, found again, and the oldest ones removed.

Knows folders and files; does not know what the numbers in them mean.

A checkpoint is `checkpoints/step_N`: the model in Hugging Face layout (float32), `optimizer.pt`, `random.pt` and
`state.json`. It is written to a hidden folder, marked complete, and renamed: a folder without the mark is never used.
The mark lists every file with its size, so that one that is lost or cut off later is noticed.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

COMPLETE = "COMPLETE"
STATE = "state.json"
STEP_FOLDER = re.compile(r"step_(\d+)")


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    save_model: Callable[[Path], None],
    optimizer: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Write `folder/step_N` atomically and return it; an existing one of the same step is replaced last."""
    target, partial = folder / f"step_{step}", folder / f".partial_step_{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_model(partial)
    torch.save(dict(optimizer), partial / "optimizer.pt")
    torch.save(_random_state(), partial / "random.pt")
    (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    _sync_files(partial)
    mark = {"step": step, "num_bytes": _sizes(partial)}
    (partial / COMPLETE).write_text(json.dumps(mark, indent=1), encoding="utf-8")
    _sync_files(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints below `folder`, by step, newest last."""
    found = [(int(match[1]), path) for path, match in _step_folders(folder) if (path / COMPLETE).is_file()]
    return [path for _, path in sorted(found)]


def incomplete_checkpoints(folder: Path) -> list[Path]:
    """Step folders without the mark of completion: a resume skips and names them."""
    return [path for path, _ in _step_folders(folder) if not (path / COMPLETE).is_file()]


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that can be read, and a line about each newer one that was passed over."""
    skipped = [f"{path}: incomplete, not used" for path in incomplete_checkpoints(folder)]
    for path in reversed(complete_checkpoints(folder)):
        try:
            check_checkpoint(path)
        except ValueError as error:
            skipped.append(f"{error}, not used")
        else:
            return path, skipped
    return None, skipped


def set_newer_aside(folder: Path, last_step: int) -> list[Path]:
    """Rename step folders past `last_step` to `step_N.after_step_<last_step>`; returns the new names.

    They are damaged, or of an attempt that is given up. A run that goes on from before them would count them as its
    newest checkpoints, and remove its own for their sake.
    """
    moved = []
    for path in [path for path, match in _step_folders(folder) if int(match[1]) > last_step]:
        first = path.with_name(f"{path.name}.after_step_{last_step}")
        others = (first.with_name(f"{first.name}.{number}") for number in itertools.count(2))
        moved.append(path.rename(next(name for name in itertools.chain([first], others) if not name.exists())))
    return moved


def check_checkpoint(path: Path) -> None:
    """Raise ValueError when a file of the checkpoint is missing, cut off or unreadable."""
    for name in (COMPLETE, STATE, "optimizer.pt", "config.json"):
        if not (path / name).is_file() or not (path / name).stat().st_size:
            raise ValueError(f"{path}: no complete checkpoint, {name} is missing or empty")
    try:
        _check_sizes(path)
        read_state(path)
        torch.load(path / "optimizer.pt", map_location="meta", weights_only=True)
        _check_weights(path)
    except Exception as error:  # every way in which a torn file fails means the same
        raise ValueError(f"{path}: damaged checkpoint ({type(error).__name__}: {error})") from error


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that the checkpoint was saved with."""
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def read_optimizer(path: Path) -> dict[str, Any]:
    """The `optimizer` mapping that the checkpoint was saved with."""
    optimizer: dict[str, Any] = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    return optimizer


def remove_old_checkpoints(folder: Path, *, keep: int | None) -> None:
    """Keep the `keep` newest complete checkpoints (None: all), and no half-written one."""
    for path in folder.glob(".partial_step_*"):
        shutil.rmtree(path, ignore_errors=True)
    if keep is not None:
        for path in complete_checkpoints(folder)[:-keep]:
            shutil.rmtree(path, ignore_errors=True)


def restore_random_state(path: Path) -> None:
    """Set the process's random generators as saved; a missing or damaged file is one warning, not an error.

    The run's own draws are functions of seed and counters and do not depend on it; user code may.
    """
    try:
        state = torch.load(path / "random.pt", map_location="cpu", weights_only=True)
        torch.set_rng_state(state["torch"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
    except (OSError, KeyError, ValueError, RuntimeError, EOFError, TypeError) as error:
        warnings.warn(
            f"{path / 'random.pt'}: random state not restored ({type(error).__name__}); draws of user code differ "
            "from an uninterrupted run",
            stacklevel=2,
        )
    except Exception as error:  # noqa: BLE001 - torch.load raises UnpicklingError and more for a torn file
        warnings.warn(f"{path / 'random.pt'}: random state not restored ({type(error).__name__})", stacklevel=2)


def _random_state() -> dict[str, Any]:
    # plain types only: the file loads with weights_only=True
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, [int(key) for key in keys], *rest],
        "python": [version, list(numbers), gauss],
    }


def _step_folders(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return [(path, match) for path in paths if path.is_dir() and (match := STEP_FOLDER.fullmatch(path.name))]


def _sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_sizes(path: Path) -> None:
    expected, found = json.loads((path / COMPLETE).read_text(encoding="utf-8"))["num_bytes"], _sizes(path)
    wrong = [name for name, size in expected.items() if found.get(name) != size]
    if wrong:
        raise ValueError(f"missing or of another size: {', '.join(wrong)}")


def _check_weights(path: Path) -> None:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError("no safetensors file")
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensors.get_slice(name).get_shape()


def _sync_files(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
