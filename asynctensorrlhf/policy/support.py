"""Whether a model computes what the policy and the engine take for granted.

Knows how to ask a model itself, on a few tokens; does not know lists of model families.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from asynctensorrlhf.policy.backbone import Backbone
from asynctensorrlhf.policy.load import num_embeddings

# Float32 noise of one forward pass against another stays two orders of magnitude below.
_TOLERANCE = 1e-3


def check_support(model: PreTrainedModel, *, num_positions: int) -> None:
    """Refuse a model whose log-probabilities would be wrong here.

    Args:
        model: float32, in eval mode.
        num_positions: longest prompt and completion together.

    Raises:
        ValueError: in one line, what the model does that is not supported.
    """
    name = type(model).__name__
    reason = _unsupported_layer(model, num_positions) or _unsupported_signature(model) or _unsupported_forward(model)
    if reason is not None:
        raise ValueError(f"model.path: {name} is not supported: {reason}")


def _unsupported_forward(model: PreTrainedModel) -> str | None:
    try:
        return _unsupported_head(model) or _unsupported_mask(model)
    except Exception as error:  # noqa: BLE001 - a family may trip over a mask or over positions in any way
        return f"it fails on the masks and positions it is given ({type(error).__name__}: {error})"


def _unsupported_layer(model: PreTrainedModel, num_positions: int) -> str | None:
    for layer in DynamicCache(config=model.config.get_text_config()).layers:
        if type(layer) is DynamicSlidingWindowLayer:
            if layer.sliding_window < num_positions:
                return (
                    f"its attention window of {layer.sliding_window} tokens is shorter than "
                    f"the {num_positions} tokens of prompt and completion"
                )
        elif type(layer) is not DynamicLayer:
            return f"it has recurrent layers ({type(layer).__name__}), whose state cannot be masked"
    return None


def _unsupported_signature(model: PreTrainedModel) -> str | None:
    if model.base_model is model or model.get_output_embeddings() is None:
        return "its head cannot be told from the layers below"
    missing = {"position_ids", "attention_mask"} - set(inspect.signature(model.base_model.forward).parameters)
    return f"its forward pass takes no {' or '.join(sorted(missing))}" if missing else None


@torch.no_grad()
def _unsupported_head(model: PreTrainedModel) -> str | None:
    ids, positions = _probe(model)
    expected = model(input_ids=ids).logits
    backbone = Backbone(model)
    actual = backbone.head(backbone(ids, position_ids=positions))
    return None if _agree(actual, expected) else "its logits are not its head applied to its hidden states"


@torch.no_grad()
def _unsupported_mask(model: PreTrainedModel) -> str | None:
    """Two sequences in one row, told apart by mask and positions, against each in a row of its own."""
    ids, positions = _probe(model)
    num_tokens = ids.shape[1]
    sequence = torch.arange(2, device=ids.device).repeat_interleave(num_tokens)
    visible = (sequence[:, None] == sequence).tril()
    backbone = Backbone(model)
    packed = backbone(ids.view(1, -1), position_ids=positions.reshape(1, -1), attention_mask=visible[None, None])
    plain = backbone(ids, position_ids=positions)
    if _agree(packed.view_as(plain), plain):
        return None
    attention = model.config._attn_implementation
    return f"it does not follow the masks and positions it is given (attention implementation: {attention})"


def _probe(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Two rows of a few ids, and their positions."""
    ids = torch.arange(8, device=model.device).view(2, 4) % num_embeddings(model)
    return ids, torch.arange(4, device=model.device).expand(2, 4)


def _agree(actual: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(actual.float(), expected.float(), rtol=_TOLERANCE, atol=_TOLERANCE))
