"""The gradient of all weights as one vector, of which every weight's gradient is a view.

Knows how to clear, sum over processes, measure and scale it in one operation each; does not know what it is the
gradient of.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn


class FlatGradient:
    """Backward passes between `clear` and `detach` add into the vector."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # smaller types lose updates of about the learning rate (a step below half a unit in the last place is no step)
        assert all(parameter.dtype == torch.float32 for parameter in self._parameters), "train float32 weights"
        sizes = [parameter.numel() for parameter in self._parameters]
        self.vector: Float[Tensor, " weight"] = self._parameters[0].new_zeros(sum(sizes))
        self._views = [
            part.view_as(parameter) for part, parameter in zip(self.vector.split(sizes), self._parameters, strict=True)
        ]

    def clear(self) -> None:
        """Zero the vector and make it the gradient of the weights, whoever replaced that."""
        self.vector.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def detach(self) -> None:
        """Leave the weights without a gradient: an optimizer step then changes neither weights nor moments."""
        for parameter in self._parameters:
            parameter.grad = None

    def sum_over_ranks(self) -> None:
        """Add up the vectors of all processes; each must call it."""
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.vector)

    def norm(self) -> Float[Tensor, ""]:
        """Euclidean norm."""
        norm: Tensor = torch.linalg.vector_norm(self.vector)
        return norm

    def scale(self, factor: float) -> None:
        """Multiply in place."""
        self.vector.mul_(factor)
