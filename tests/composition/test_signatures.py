"""One YAML file is one object: its keys are the arguments that the composition does not give by itself."""

import inspect
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from tests.composition.composing import OPTIONS, chosen, compose

# what the composition passes, by group
GIVEN = {
    "advantage": set(),
    "buffer": {"groups_per_step", "wait_timeout_s", "synchronous"},
    "data": {"tokenizer", "seed", "eval_draws", "context_limit"},
    "engine": {
        "model_or_path",
        "device",
        "seed",
        "max_new_tokens",
        "temperature",
        "max_concurrent",
        "stop_token_ids",
        "num_token_ids",
        "kv",
        "greedy",
    },
    "loss": set(),
    "reward": {"stop_token_ids"},
}
GROUPS = (*GIVEN, "loss.correction", "advantage.critic")


def node_of(cfg: DictConfig, path: str) -> Any:
    return OmegaConf.select(cfg, path)


@pytest.mark.parametrize("option", OPTIONS)
def test_keys_are_the_arguments_of_the_target(option: str) -> None:
    group = option.partition("=")[0].replace("/", ".")
    cfg = compose(*chosen(option))
    for path in GROUPS:
        node = node_of(cfg, path)
        if not path.startswith(group) or node is None or "_target_" not in node:
            continue
        parameters = inspect.signature(get_object(node["_target_"])).parameters.values()
        named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
        assert {str(key) for key in node} - {"_target_", "_partial_"} == named - GIVEN.get(path, set())
