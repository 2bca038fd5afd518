"""Bytes of the tensors alive at once during a block, counted as they are made and dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """What the block allocates; what was there before does not count."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes
