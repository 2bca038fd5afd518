"""A KV cache of fixed slots: one row a running completion, each row at a length of its own.

Knows where keys and values of a row live; does not know what is sampled into them.

Every row starts at column 0, and a step sees a multiple of `GRANULE` columns and rows. On a CPU with one thread a
row's results then have the same bits whatever else runs beside it: matrix products of one to three rows have others,
and with two threads those of other odd numbers too.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GRANULE = 16


def round_up(number: int) -> int:
    """The smallest multiple of `GRANULE` that holds `number`."""
    return -(-number // GRANULE) * GRANULE


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[slot, head, column, feature]`; a step writes one column a row."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, num_slots: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_slots = num_slots
        self.columns: Int[Tensor, " row"] | None = None
        self.num_columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate no column yet: `reserve` does."""
        _, heads, _, _ = key_states.shape
        self.keys = key_states.new_zeros(self.num_slots, heads, 0, key_states.shape[-1])
        self.values = value_states.new_zeros(self.num_slots, heads, 0, value_states.shape[-1])
        self.is_initialized = True

    def reserve(self, num_columns: int) -> None:
        """Grow to at least `num_columns`, keeping what is there."""
        missing = num_columns - self.keys.shape[2]
        if missing > 0:
            pad = (0, 0, 0, missing)
            self.keys = torch.nn.functional.pad(self.keys, pad)
            self.values = torch.nn.functional.pad(self.values, pad)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new column of each row and return the columns that the step sees."""
        assert self.columns is not None, "aim() comes before a decode step"
        num_rows = key_states.shape[0]
        rows = torch.arange(num_rows, device=key_states.device)
        # under autocast keys and values of one step may differ in dtype from those that a prefill left
        self.keys[rows, :, self.columns] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.columns] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:num_rows, :, : self.num_columns], self.values[:num_rows, :, : self.num_columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Not asked for: the engine passes a mask of its own."""
        return self.num_columns, 0

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.num_columns

    def get_max_length(self) -> int:
        """No limit: columns are added as rows grow."""
        return -1


class SlotCache:
    """The layers of all slots, and the moves of whole rows between them."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.layers = [SlotLayer(num_slots) for _ in range(num_layers)]
        self.cache = Cache(layers=list(self.layers))

    def write_prefixes(
        self,
        rows: slice,
        keys: list[Float[Tensor, "row head column feature"]],
        values: list[Float[Tensor, "row head column feature"]],
    ) -> None:
        """Start `rows` with the given columns, from column 0."""
        for layer, layer_keys, layer_values in zip(self.layers, keys, values, strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(layer_keys, layer_values)
            layer.reserve(layer_keys.shape[2])
            layer.keys[rows, :, : layer_keys.shape[2]] = layer_keys
            layer.values[rows, :, : layer_values.shape[2]] = layer_values

    def aim(self, columns: Int[Tensor, " row"], num_columns: int) -> Bool[Tensor, "row 1 1 column"]:
        """Say at which column each row's next token goes; returns the mask of the step."""
        for layer in self.layers:
            layer.reserve(num_columns)
            layer.columns, layer.num_columns = columns, num_columns
        positions = torch.arange(num_columns, device=columns.device)
        return (positions <= columns[:, None])[:, None, None, :]

    def move(self, source: Int[Tensor, " row"], target: Int[Tensor, " row"]) -> None:
        """Copy rows `source` over rows `target`."""
        for layer in self.layers:
            layer.keys[target] = layer.keys[source]
            layer.values[target] = layer.values[source]
