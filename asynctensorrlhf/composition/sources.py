"""What a run needs before any weight is loaded: tokenizer, limits, data, answers.

Knows model folders by their config; does not know weights, engines or training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.interfaces import Reward
from asynctensorrlhf.policy.gguf import plain_model_folder
from asynctensorrlhf.policy.load import (
    check_vocabulary,
    context_length,
    load_tokenizer,
    stop_token_ids_before_loading,
)
from asynctensorrlhf.warm_start import tiny_llama_path

# below the folder where the command was typed
CONVERTED_MODELS = Path("outputs/models")


@dataclass(frozen=True)
class Sources:
    """Tokenizer, limits, data and answers of a run.

    Attributes:
        model_path: folder or hub id of the model that the run starts from: after a resume, the checkpoint.
        ref_path: of the frozen reference of KL terms: the model that the run began with, unless another is asked for.
        config: of that model.
        tokenizer: of that model.
        num_token_ids: ids that can be sampled.
        context_length: positions of the model.
        stop_token_ids: every id that ends a completion of this run.
        data: prompts, and held-out prompts.
        reward: scores completions.
        answers: what `reward.encode` made of the prompts' rows.
        heldout_answers: the same of the held-out rows; empty without them.
    """

    model_path: str
    ref_path: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    num_token_ids: int
    context_length: int
    stop_token_ids: tuple[int, ...]
    data: PromptData
    reward: Reward
    answers: Mapping[str, Tensor]
    heldout_answers: Mapping[str, Tensor]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        held = self.data.heldout.rows if self.data.heldout is not None else ()
        return max(len(row.prompt_ids) for row in (*self.data.train.rows, *held))


def load_sources(cfg: DictConfig, checkpoint: Path | None) -> Sources:
    """Tokenizer, data and answers; a checkpoint to go on from takes the place of `model.path`.

    Raises:
        ConfigError: the model can't be found, its context is too short for `rollout.max_new_tokens`, or the data, its
            answers or the stop tokens can't be used.
    """
    path, config, tokenizer = _load_model_files(cfg, checkpoint)
    try:
        limit = context_length(config, tokenizer)
        num_token_ids = check_vocabulary(tokenizer, config)
        room = _room_for_prompts(cfg, limit)
        stops = stop_token_ids_before_loading(path, config, tokenizer, _extra_stops(cfg, num_token_ids))
        data = _load_data(cfg, tokenizer, room)
        reward = instantiate(cfg.reward)(stop_token_ids=stops)
        answers = reward.encode(data.train.rows, tokenizer)
        heldout_answers = reward.encode(data.heldout.rows, tokenizer) if data.heldout is not None else {}
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_one_step(cfg, data)
    reference = plain_model_folder(str(cfg.model.ref_path or cfg.model.path or tiny_llama_path()), CONVERTED_MODELS)
    return Sources(
        path, reference, config, tokenizer, num_token_ids, limit, stops, data, reward, answers, heldout_answers
    )


def _load_model_files(
    cfg: DictConfig, checkpoint: Path | None
) -> tuple[str, PreTrainedConfig, PreTrainedTokenizerBase]:
    """Path, config and tokenizer of the model."""
    path = str(checkpoint or cfg.model.path or tiny_llama_path())
    options = {"trust_remote_code": cfg.model.trust_remote_code}
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        # a hub would be asked for it otherwise, and complain about its name
        raise ConfigError(f"model.path={path}: no such folder")
    try:
        path = plain_model_folder(path, CONVERTED_MODELS)
        return path, AutoConfig.from_pretrained(path, **options), load_tokenizer(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path={path}: can't be loaded ({reason})") from error


def _room_for_prompts(cfg: DictConfig, limit: int) -> int:
    room: int = limit - cfg.rollout.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens={cfg.rollout.max_new_tokens}: leaves no room for a prompt in the model's context "
            f"of {limit} tokens"
        )
    return room


def _extra_stops(cfg: DictConfig, num_token_ids: int) -> list[int]:
    """The stop tokens that the config adds: one that can't be sampled would end nothing."""
    extra = list(cfg.rollout.stop_token_ids)
    if extra and max(extra) >= num_token_ids:
        raise ConfigError(f"rollout.stop_token_ids={extra}: the tokenizer has the ids 0 to {num_token_ids - 1}")
    return extra


def _load_data(cfg: DictConfig, tokenizer: PreTrainedTokenizerBase, context_limit: int) -> PromptData:
    plain = OmegaConf.to_container(cfg.data, resolve=True)
    assert isinstance(plain, dict)
    arguments = {str(key): value for key, value in plain.items() if key not in ("_target_", "_partial_")}
    # not Hydra's instantiate, which reads a text once more: an escaped ${ would become a reference to another key
    load = get_object(plain["_target_"])
    data: PromptData = load(
        **arguments, tokenizer=tokenizer, seed=cfg.seed, eval_draws=cfg.trainer.eval_draws, context_limit=context_limit
    )
    return data


def _check_one_step(cfg: DictConfig, data: PromptData) -> None:
    num_draws, needed = data.train.num_draws, cfg.trainer.groups_per_step
    if num_draws is not None and num_draws < needed and not cfg.trainer.partial_batch:
        raise ConfigError(
            f"trainer.groups_per_step={needed}: the data ends after {num_draws} draws, before the first step; "
            "lower it, set trainer.partial_batch=true, or draw the data more often"
        )
