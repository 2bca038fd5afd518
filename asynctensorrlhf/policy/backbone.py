"""A causal language model split into its transformer stack and its head, with the cache under the name it expects.

Knows how to call a transformers model; does not know sampling, losses or slots.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer


class Backbone:
    """Calls the stack below the head, so that logits are only made where they are needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.stack = model.base_model
        self.head = model.get_output_embeddings()
        self.config = model.config.get_text_config()
        parameters = inspect.signature(self.stack.forward).parameters
        # transformers renamed the argument; the old name warns before it goes
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def num_layers(self) -> int:
        """Layers with keys and values."""
        return int(self.config.num_hidden_layers)

    @property
    def context_length(self) -> int:
        """Most positions the model knows."""
        return int(self.config.max_position_embeddings)

    def __call__(
        self,
        input_ids: Int[Tensor, "row token"],
        *,
        position_ids: Int[Tensor, "row token"],
        attention_mask: Bool[Tensor, "row 1 token column"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "row token hidden"]:
        """Hidden states of the last layer; `attention_mask` True = may be seen, None = plain causal."""
        arguments: dict[str, Any] = {self.cache_argument: cache} if cache is not None else {}
        output = self.stack(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=cache is not None,
            **arguments,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def prefill(
        self, input_ids: Int[Tensor, "row token"]
    ) -> tuple[Float[Tensor, "row token hidden"], list[Tensor], list[Tensor]]:
        """Hidden states, and keys and values of every layer, of right-padded prompts (padding sees, is not seen)."""
        cache = DynamicCache()
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = self(input_ids, position_ids=positions, cache=cache)
        layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        return hidden, [_present(layer.keys) for layer in layers], [_present(layer.values) for layer in layers]

    def decode(
        self,
        last_tokens: Int[Tensor, " row"],
        positions: Int[Tensor, " row"],
        attention_mask: Bool[Tensor, "row 1 1 column"],
        cache: Cache,
    ) -> Float[Tensor, "row hidden"]:
        """One token a row at its own position."""
        hidden = self(last_tokens[:, None], position_ids=positions[:, None], attention_mask=attention_mask, cache=cache)
        return hidden[:, 0]


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a layer that has seen tokens holds keys and values"
    return tensor
