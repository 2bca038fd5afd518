"""Peak of the memory that a computation takes beyond its inputs.

Knows live tensors on the CPU and the allocator of a GPU; does not know what is computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(action: Callable[[], object], *inputs: torch.Tensor) -> int:
    """Most bytes of tensors alive at once during a call, its inputs not counted.

    On a GPU that of its allocator; on the CPU the storages of every tensor that torch makes, kernels' own scratch
    memory left out.
    """
    device = inputs[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_allocated(device)
        action()
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before
    live = LiveBytes(*inputs)
    with live:
        action()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors alive at once during a block, counted as they are made and dropped.

    Args:
        known: tensors that were there before.
    """

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes
