"""The tiny policy that ships with the package, so that the default job needs no download.

Knows where its files are; does not load them.
"""

from pathlib import Path


def tiny_llama_path() -> Path:
    """Folder of the shipped tiny Llama: loads with `from_pretrained`; made by `make_tiny_llama.py`."""
    return Path(__file__).parent / "tiny_llama"
