"""What a run needs before any weight is loaded: tokenizer, limits, data.

Knows model folders by their config; does not know weights, engines or training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.policy.gguf import plain_model_folder
from asynctensorrlhf.policy.load import check_vocabulary, context_length, load_tokenizer
from asynctensorrlhf.warm_start import tiny_llama_path

# below the folder where the command was typed
CONVERTED_MODELS = Path("outputs/models")


@dataclass(frozen=True)
class Sources:
    """Tokenizer, limits and data of a run.

    Attributes:
        model_path: folder or hub id of the model that the run starts from.
        config: of that model.
        tokenizer: of that model.
        num_token_ids: ids that can be sampled.
        context_length: positions of the model.
        data: prompts, and held-out prompts.
    """

    model_path: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    num_token_ids: int
    context_length: int
    data: PromptData

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, held-out ones included."""
        held = self.data.heldout.rows if self.data.heldout is not None else ()
        return max(len(row.prompt_ids) for row in (*self.data.train.rows, *held))


def load_sources(cfg: DictConfig, checkpoint: Path | None) -> Sources:
    """Tokenizer and data; a checkpoint to go on from takes the place of `model.path`.

    Raises:
        ConfigError: the model can't be found, its context is too short for `rollout.max_new_tokens`, or the data can't
            be used.
    """
    path = str(checkpoint or cfg.model.path or tiny_llama_path())
    options = {"trust_remote_code": cfg.model.trust_remote_code}
    if path.startswith((".", "/", "~")) and not Path(path).exists():
        # a hub would be asked for it otherwise, and complain about its name
        raise ConfigError(f"model.path={path}: no such folder")
    try:
        path = plain_model_folder(path, CONVERTED_MODELS)
        config = AutoConfig.from_pretrained(path, **options)
        tokenizer = load_tokenizer(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path={path}: can't be loaded ({reason})") from error
    limit = context_length(config, tokenizer)
    if limit <= cfg.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.max_new_tokens={cfg.rollout.max_new_tokens}: leaves no room for a prompt in the model's context "
            f"of {limit} tokens"
        )
    try:
        data = instantiate(cfg.data)(
            tokenizer=tokenizer,
            seed=cfg.seed,
            eval_draws=cfg.trainer.eval_draws,
            context_limit=limit - cfg.rollout.max_new_tokens,
        )
        sources = Sources(path, config, tokenizer, check_vocabulary(tokenizer, config), limit, data)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_one_step(cfg, data)
    return sources


def _check_one_step(cfg: DictConfig, data: PromptData) -> None:
    num_draws, needed = data.train.num_draws, cfg.trainer.groups_per_step
    if num_draws is not None and num_draws < needed and not cfg.trainer.partial_batch:
        raise ConfigError(
            f"trainer.groups_per_step={needed}: the data ends after {num_draws} draws, before the first step; "
            "lower it, set trainer.partial_batch=true, or draw the data more often"
        )
