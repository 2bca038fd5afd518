"""A checkpoint as a model to train: its weights, limits, vocabulary and stop ids.

Knows what a folder or hub id must hold to be trusted; does not know devices, optimizers or data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

# What transformers writes when a tokenizer has no limit is 10**30; no real limit comes near this.
_NO_LIMIT = 10**9


def load_model(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The causal language model at `path`, complete, in eval mode and in float32 whatever the file holds.

    Call it before other threads start: transformers changes the process-wide default dtype while it loads.

    Args:
        path: folder or hub id.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: weights are missing, unexpected, or differ where the config ties them, or transformers refuses.
    """
    try:
        # the stubs know nothing of the pair that output_loading_info returns
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            # masks and caches of packed rows are made for this one
            attn_implementation="sdpa",
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (ValueError, OSError) as error:
        # what follows the first sentence is advice about transformers' own arguments
        raise ValueError(f"model.path={path}: can't be loaded ({str(error).split('. ')[0]})") from error
    finally:
        torch.set_default_dtype(torch.float32)
    model: PreTrainedModel = loaded[0]
    for problem in ("missing", "unexpected"):
        names = sorted(loaded[1][f"{problem}_keys"])
        if names:
            raise ValueError(f"model.path={path}: {problem} weights {names[:5]} ({len(names)} in all)")
    _check_tied(model, path)
    model.eval()
    return model


def _check_tied(model: PreTrainedModel, path: str) -> None:
    """Refuse a file whose head differs from the embedding that its config ties it to: engines would ignore one."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = model.config.get_text_config().tie_word_embeddings
    if is_tied and head is not None and head.weight is not embedding.weight:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        raise ValueError(
            f"model.path={path}: the config ties {names[id(head.weight)]} to {names[id(embedding.weight)]}, but the "
            "file holds different values for them; set tie_word_embeddings to false in its config, or drop one"
        )


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, with the tokens of its own files and no others.

    Where the files name the generic class, that one is loaded. `AutoTokenizer` would choose by the model's type, and
    such a class adds the special tokens of its family: ids that this model has no embedding for.
    """
    named = get_tokenizer_config(path).get("tokenizer_class")
    is_generic = named in ("TokenizersBackend", "PreTrainedTokenizerFast")
    loader = PreTrainedTokenizerFast if is_generic else AutoTokenizer
    tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(path, trust_remote_code=trust_remote_code)
    return tokenizer


def stop_token_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, extra: Iterable[int] = ()
) -> tuple[int, ...]:
    """Every id that ends a completion: EOS of generation config, config and tokenizer, and `extra`; ascending."""
    return _eos_ids((model.generation_config, model.config, model.config.get_text_config(), tokenizer), extra)


def stop_token_ids_before_loading(
    path: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, extra: Iterable[int] = ()
) -> tuple[int, ...]:
    """What `stop_token_ids` will say of the model at `path`, told without its weights."""
    try:
        generation = GenerationConfig.from_pretrained(path)
    except OSError:
        # there need not be one: the model then generates by its config
        generation = None
    return _eos_ids((generation, config, config.get_text_config(), tokenizer), extra)


def _eos_ids(holders: Iterable[Any], extra: Iterable[int]) -> tuple[int, ...]:
    found = set(extra)
    for holder in holders:
        if holder is not None:
            found.update(_ids_of(holder.eos_token_id))
    return tuple(sorted(found))


def _ids_of(eos_token_id: Any) -> list[int]:
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


def context_length(model: PreTrainedModel | PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    """Most positions of the model; the tokenizer's limit counts only where the config names none.

    Raises:
        ValueError: neither names a limit.
    """
    config = _text_config(model)
    positions = config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None
    if positions is None and tokenizer is not None and tokenizer.model_max_length < _NO_LIMIT:
        positions = tokenizer.model_max_length
    if positions is None:
        raise ValueError("model.path: neither the config nor the tokenizer says how many positions the model has")
    return int(positions)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PreTrainedConfig) -> int:
    """How many ids can be sampled: those the tokenizer knows. Rows of the model beyond them stay, and are masked.

    Args:
        tokenizer: the model's.
        model: or its config, before weights are loaded.

    Raises:
        ValueError: the tokenizer has an id that the embedding has no row for.
    """
    num_rows = num_embeddings(model) if isinstance(model, PreTrainedModel) else _text_config(model).vocab_size
    # the largest id, not the number of entries: a vocabulary may have holes
    num_ids = max(tokenizer.get_vocab().values()) + 1
    if num_ids > num_rows:
        raise ValueError(
            f"model.path: the tokenizer has {num_ids} ids, but the model's embedding only {num_rows} rows; "
            "resize the embedding and train it, or use the tokenizer the model was trained with"
        )
    return num_ids


def num_embeddings(model: PreTrainedModel) -> int:
    """Rows of the input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _text_config(model: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config = model.config if isinstance(model, PreTrainedModel) else model
    return config.get_text_config()
