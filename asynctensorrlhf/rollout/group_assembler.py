"""Puts samples, which finish in any order, together to the groups they were drawn for.

Knows how many samples a group has; does not know rewards or buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

from asynctensorrlhf.types import Sample


class GroupAssembler:
    """Collects samples by group and gives a group out when its last one comes, ordered by `sample_index`."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._partial: dict[int, list[Sample]] = {}

    def add(self, samples: Iterable[Sample]) -> list[list[Sample]]:
        """Take samples in; returns the groups that they complete, in the order of completion.

        Raises:
            ValueError: a sample came twice, or its index lies outside the group.
        """
        complete = []
        for sample in samples:
            group = self._partial.setdefault(sample.prompt.group_id, [])
            if sample.sample_index >= self.group_size or any(s.sample_index == sample.sample_index for s in group):
                raise ValueError(
                    f"sample {sample.sample_index} of group {sample.prompt.group_id} is not one of "
                    f"{self.group_size} that are missing"
                )
            group.append(sample)
            if len(group) == self.group_size:
                complete.append(sorted(self._partial.pop(sample.prompt.group_id), key=lambda s: s.sample_index))
        return complete
