"""The newest published weights, for readers in any thread.

Knows names, tensors and versions; does not know who trains or who generates.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from asynctensorrlhf.types import WeightSnapshot


class WeightStore:
    """Holds one immutable snapshot; publishing replaces it, readers keep the one they hold.

    A snapshot is a copy: the trainer goes on at once, and an engine copies from it while the next one is written. Old
    snapshots live as long as a reader holds them, so at most one per engine besides the newest; and the last
    `num_kept`, for whoever asks what an older version would have said.

    Example:
        >>> store = WeightStore({"w": torch.zeros(2)}, policy_version=0)
        >>> held = store.latest()
        >>> store.publish({"w": torch.ones(2)}, policy_version=1)
        >>> held.tensors["w"].tolist(), store.latest().tensors["w"].tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, policy_version: int, num_kept: int = 1) -> None:
        assert num_kept >= 1, "the newest is always kept"
        self._lock = threading.Lock()
        self._snapshot = WeightSnapshot(policy_version, _copy(tensors))
        self._kept = deque([self._snapshot], maxlen=num_kept)

    def latest(self) -> WeightSnapshot:
        """The newest snapshot; never waits for a publication in progress."""
        with self._lock:
            return self._snapshot

    def of_version(self, policy_version: int) -> WeightSnapshot | None:
        """The snapshot of that version, if it is among the last `num_kept`."""
        with self._lock:
            return next((kept for kept in self._kept if kept.policy_version == policy_version), None)

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        """Copy `tensors` and make them the newest version, whole or not at all.

        Raises:
            ValueError: a name or shape differs from the last snapshot, or the version does not rise.
        """
        last = self.latest()
        if policy_version <= last.policy_version:
            raise ValueError(f"policy_version must rise above {last.policy_version}, got {policy_version}")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {name: tuple(tensor.shape) for name, tensor in last.tensors.items()}
        if shapes != expected:
            differing = sorted(name for name in shapes | expected if shapes.get(name) != expected.get(name))
            raise ValueError(f"published weights differ from the last ones in name or shape: {differing[:5]}")
        snapshot = WeightSnapshot(policy_version, _copy(tensors))
        with self._lock:
            self._snapshot = snapshot
            self._kept.append(snapshot)


def _copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    with torch.no_grad():
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for device in {tensor.device for tensor in copies.values() if tensor.is_cuda}:
        # a reader on another stream must not see a copy that is still under way
        torch.cuda.synchronize(device)
    return copies
