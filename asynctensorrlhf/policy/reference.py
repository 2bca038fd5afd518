"""The frozen reference of KL terms.

Knows how to keep a model from ever changing; does not know what it is compared with. A `Policy` over it scores tokens
by the very function of the trained one.
"""

from __future__ import annotations

import copy

from transformers import PreTrainedModel


def frozen(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, without gradients."""
    model.requires_grad_(False)
    model.eval()
    return model


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the weights as they are now, without gradients."""
    return frozen(copy.deepcopy(model))
