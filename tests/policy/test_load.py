from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, BloomConfig, PreTrainedTokenizerFast

from asynctensorrlhf.policy.load import (
    check_vocabulary,
    context_length,
    load_model,
    stop_token_ids,
    stop_token_ids_before_loading,
)
from tests.policy.tiny import tiny_config, tiny_model


def save(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    tiny_model(family).to(dtype).save_pretrained(folder)
    return folder


def edit_weights(folder: Path, remove: str | None = None, **added: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if name != remove}
    save_file(tensors | added, path, metadata={"format": "pt"})


def make_tokenizer(num_ids: int, **options: object) -> PreTrainedTokenizerFast:
    vocabulary = {f"t{index}": index for index in range(num_ids)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_are_float32_and_dropout_off_whatever_the_checkpoint_holds(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load_model(str(save(tmp_path, "gpt2", dtype)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


def test_default_dtype_is_float32_after_a_load_that_failed(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(Exception, match="header"):
            load_model(str(tmp_path))
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_tied_head_shares_its_storage_after_load(tmp_path: Path) -> None:
    model = load_model(str(save(tmp_path)))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_head_that_differs_under_a_tied_config_is_refused(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), **{"lm_head.weight": torch.randn(40, 32)})
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight"):
        load_model(str(tmp_path))


def test_missing_weights_are_an_error_that_names_them(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), remove="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"missing weights \['model\.layers\.1\.mlp\.up_proj\.weight'\]"):
        load_model(str(tmp_path))


def test_unexpected_weights_are_an_error_that_names_them(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), **{"value_head.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unexpected weights \['value_head\.weight'\]"):
        load_model(str(tmp_path))


def test_every_eos_id_of_model_and_tokenizer_stops() -> None:
    model, tokenizer = tiny_model("llama"), make_tokenizer(40, eos_token="t9")
    model.config.eos_token_id = 7
    model.generation_config.eos_token_id = [7, 8]
    assert stop_token_ids(model, tokenizer, [3, 9]) == (3, 7, 8, 9)
    assert stop_token_ids(model, make_tokenizer(40)) == (7, 8)


@pytest.mark.parametrize("has_file", [True, False])
def test_the_stop_ids_are_known_before_the_weights_are_loaded(tmp_path: Path, has_file: bool) -> None:
    model, tokenizer = tiny_model("llama"), make_tokenizer(40, eos_token="t9")
    model.config.eos_token_id, model.generation_config.eos_token_id = 7, [7, 8]
    model.save_pretrained(tmp_path)
    if not has_file:
        (tmp_path / "generation_config.json").unlink()
    expected = stop_token_ids(load_model(str(tmp_path)), tokenizer, [3])
    config = AutoConfig.from_pretrained(tmp_path)
    assert stop_token_ids_before_loading(str(tmp_path), config, tokenizer, [3]) == expected
    assert expected == ((3, 7, 8, 9) if has_file else (3, 7, 9))


def test_a_folder_that_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"^model\.path={tmp_path}: can't be loaded \(.*no file named") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_context_is_the_models_and_a_tokenizer_without_limit_says_nothing() -> None:
    config, tokenizer = tiny_config("gpt2", num_positions=64), make_tokenizer(40)
    assert tokenizer.model_max_length > 10**9
    assert context_length(config, tokenizer) == 64
    assert context_length(tiny_model("gpt2", num_positions=64)) == 64


def test_a_model_without_positions_takes_the_tokenizers_limit_or_is_refused() -> None:
    config = BloomConfig()
    assert context_length(config, make_tokenizer(40, model_max_length=128)) == 128
    with pytest.raises(ValueError, match="how many positions"):
        context_length(config, make_tokenizer(40))


def test_ids_beyond_the_tokenizer_are_not_counted() -> None:
    assert check_vocabulary(make_tokenizer(33), tiny_model("llama")) == 33
    assert check_vocabulary(make_tokenizer(33), tiny_config("llama")) == 33


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_numbers() -> None:
    for model in (tiny_model("llama"), tiny_config("llama")):
        with pytest.raises(ValueError, match=r"41 ids.*40 rows"):
            check_vocabulary(make_tokenizer(41), model)


def test_a_vocabulary_with_holes_counts_up_to_its_largest_id() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 38}, unk_token="a")))
    assert check_vocabulary(tokenizer, tiny_model("llama")) == 39
