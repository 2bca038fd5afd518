"""One YAML file is one object: its keys are the arguments that the composition does not give by itself."""

import inspect
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object

from asynctensorrlhf.composition.paths import conf_dir

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
FILES = [path for path in sorted(conf_dir().glob("*/*.yaml")) if "_target_" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_keys_are_the_arguments_of_the_target(path: Path):
    option = yaml.safe_load(path.read_text(encoding="utf-8"))
    parameters = inspect.signature(get_object(option["_target_"])).parameters.values()
    named = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    assert option.keys() - {"_target_", "_partial_"} == named - GIVEN[path.parent.name]
