"""The weights an engine owns: their precision and how a published snapshot gets into them.

Knows names, shapes and dtypes; does not know what is generated with them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from asynctensorrlhf.types import WeightSnapshot


class EngineWeights:
    """Named tensors of a model, and the places that each of them fills.

    With bfloat16, weights of linear layers are stored in bfloat16 and all others in float32: under autocast this
    computes what the trainer's float32 weights compute under autocast, without a cast at every step. A tied head
    gets a bfloat16 copy of its own, filled from the embedding.
    """

    def __init__(self, model: PreTrainedModel, *, dtype: Literal["float32", "bfloat16"]) -> None:
        self.model = model
        embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
        head = model.get_output_embeddings()
        is_tied = head.weight is embedding
        if dtype == "bfloat16":
            if is_tied:
                head.weight = nn.Parameter(embedding.detach().clone(), requires_grad=False)
            _store_linear_layers_in(model, torch.bfloat16)
        persistent = set(model.state_dict())
        tensors: dict[str, Tensor] = dict(model.named_parameters())
        tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        self.places: dict[str, list[Tensor]] = {name: [tensor] for name, tensor in tensors.items()}
        if is_tied and head.weight is not embedding:
            (head_name,) = (name for name, tensor in tensors.items() if tensor is head.weight)
            (embedding_name,) = (name for name, tensor in tensors.items() if tensor is embedding)
            self.places[embedding_name] += self.places.pop(head_name)

    def load(self, snapshot: WeightSnapshot) -> None:
        """Copy a snapshot in; checked as a whole before the first tensor is written.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape; nothing was changed.
        """
        given = snapshot.tensors
        missing, unknown = sorted(self.places.keys() - given), sorted(given.keys() - self.places)
        misshapen = [
            f"{name} {tuple(given[name].shape)} instead of {tuple(places[0].shape)}"
            for name, places in self.places.items()
            if name in given and given[name].shape != places[0].shape
        ]
        if missing or unknown or misshapen:
            raise ValueError(
                f"weights of version {snapshot.policy_version} do not fit the engine: missing {missing[:3]} "
                f"({len(missing)}), unknown {unknown[:3]} ({len(unknown)}), shapes {misshapen[:3]} ({len(misshapen)})"
            )
        with torch.no_grad():
            for name, places in self.places.items():
                for place in places:
                    place.copy_(given[name])


def _store_linear_layers_in(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.to(dtype)
