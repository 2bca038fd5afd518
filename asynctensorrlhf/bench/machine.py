"""What a measurement was made on, and where its result goes.

Knows processor, versions and threads, and one file a folder; does not know what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asynctensorrlhf.composition.errors import ConfigError

RESULT = "result.json"


def device_of(setting: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: it is neither the CPU nor a CUDA device of this machine.
    """
    try:
        device = torch.device(setting)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={setting}: not on this machine; use cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={setting}: must be cpu, cuda or cuda:N")
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Facts that a figure means nothing without."""
    return {
        "processor": _processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def result_path(output_dir: str) -> Path:
    """Where the result of a measurement that starts now goes; date and time are filled in as in `strftime`.

    Raises:
        ConfigError: the folder holds a result already, or can't be made.
    """
    path = Path(time.strftime(output_dir)) / RESULT
    if path.exists():
        raise ConfigError(f"output_dir={output_dir}: holds a {RESULT} already; name another folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir={output_dir}: can't be made ({error.strerror})") from error
    return path


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """The result as JSON."""
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
