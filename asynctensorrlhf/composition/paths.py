"""Where the config files are, and which folders already hold a run.

Knows names of folders and files; does not know what is in them.
"""

from __future__ import annotations

from pathlib import Path

from asynctensorrlhf.composition.errors import ConfigError

PRIMARY = "train"
RUN_MARKS = ("config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoints", "final", "sweep.json")


def conf_dir() -> Path:
    """The shipped config: `conf/` inside an installed package, beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "conf", package.parent / "conf")
    found = next((folder for folder in candidates if (folder / f"{PRIMARY}.yaml").is_file()), None)
    if found is None:
        raise ConfigError(f"conf/{PRIMARY}.yaml is neither in nor beside the package {package}: install it again")
    return found


def refuse_used_folder(folder: Path, *, is_resumed: bool) -> None:
    """Refuse a folder that can't take a run.

    Raises:
        ConfigError: it is no folder, or a run has left its files there and is not to be resumed.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output_dir={folder}: is a file; name a folder")
    if not is_resumed and any((folder / mark).exists() for mark in RUN_MARKS):
        raise ConfigError(
            f"output_dir={folder}: already holds a run; add resume=auto to go on, or choose another folder"
        )
