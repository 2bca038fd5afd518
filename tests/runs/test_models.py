"""Whole runs of other model families and tokenizers than the default job's."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.runs.running import is_conserved, train

ROPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def byte_level_tokenizer(**special):
    """256 bytes and `<eos>`, `<end>`; saved without a length limit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "<eos>", "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", **special)


def save(folder, model, tokenizer):
    torch.manual_seed(0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_gpt2(folder):
    config = GPT2Config(
        vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=256, bos_token_id=256
    )
    return save(folder, GPT2LMHeadModel(config), byte_level_tokenizer(pad_token="<eos>"))


def make_qwen2(folder):
    config = Qwen2Config(vocab_size=258, tie_word_embeddings=False, eos_token_id=[256, 257], bos_token_id=None, **ROPE)
    return save(folder, Qwen2ForCausalLM(config), byte_level_tokenizer())


def make_wide_llama(folder):
    config = LlamaConfig(vocab_size=400, tie_word_embeddings=True, eos_token_id=256, **ROPE)
    return save(folder, LlamaForCausalLM(config), byte_level_tokenizer())


def data_of(folder, prompts=("2+2=", "what is one?", "7", "a b c")):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": p, "gold": str(len(p))}) + "\n" for p in prompts))
    names = ("data.prompt_column=question", "data.answer_column=gold", "reward.answer_column=gold")
    return ("data=jsonl", f"data.path={path}", *names, "rollout.max_new_tokens=8")


@pytest.mark.parametrize("make", [make_gpt2, make_qwen2, make_wide_llama])
def test_ratios_are_one_on_untouched_weights_and_ids_stay_in_the_vocabulary(tmp_path, make):
    model = make(tmp_path / "model")
    options = (f"model.path={model}", *data_of(tmp_path), "rollout.temperature=1.7", "trainer.diagnostics_every=1")
    run = train(tmp_path / "run", *options)
    assert run.exit_code == 0
    assert run.metrics[0]["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert run.metrics[0]["ratio/abs_log_ratio_max"] < 1e-4
    assert all(max(row["completion_ids"]) < 258 for row in run.samples)
    assert is_conserved(run.summary)
    stops = {256, 257} if make is make_qwen2 else {256}
    for row in run.samples:
        assert not stops & set(row["completion_ids"][:-1])
        is_stopped = row["completion_ids"][-1] in stops
        assert row["finish_reason"] == ("stop" if is_stopped else "length")
        assert is_stopped or len(row["completion_ids"]) == 8


def test_a_wider_model_keeps_its_rows(tmp_path):
    run = train(tmp_path / "run", f"model.path={make_wide_llama(tmp_path / 'model')}", *data_of(tmp_path))
    assert run.weights["model.embed_tokens.weight"].shape[0] == 400


def test_a_tokenizer_with_more_ids_than_the_model_is_one_line_before_rollouts(tmp_path, capfd):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, tie_word_embeddings=True, eos_token_id=256, **ROPE)
    model = save(tmp_path / "model", LlamaForCausalLM(config), byte_level_tokenizer())
    run = train(tmp_path / "run", f"model.path={model}", *data_of(tmp_path))
    error = capfd.readouterr().err
    assert run.exit_code == 2
    assert "258 ids" in error
    assert "257 rows" in error
    assert error.count("\n") == 1


def test_dropout_of_the_config_is_off_in_training_and_kept_in_what_is_saved(tmp_path):
    model = make_gpt2(tmp_path / "model")
    run = train(tmp_path / "run", f"model.path={model}", *data_of(tmp_path))
    saved = json.loads((run.folder / "final" / "config.json").read_text())
    assert saved["resid_pdrop"] == saved["attn_pdrop"] == 0.1


def test_a_bfloat16_checkpoint_is_trained_in_float32(tmp_path):
    # a step this small is lost in bfloat16 for nearly every weight
    make_wide_llama(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    options = ("optim.lr=1e-6", "trainer.num_steps=10", "reward.mode=contains")
    data = data_of(tmp_path, prompts=("1", "2", "3", "4"))
    run = train(tmp_path / "run", f"model.path={tmp_path / 'model'}", *data, *options, "rollout.group_size=16")
    assert any(row["train/has_signal"] for row in run.metrics)
    after = run.weights["model.layers.0.mlp.up_proj.weight"]
    assert after.dtype == torch.float32
    changed = after != before["model.layers.0.mlp.up_proj.weight"].float()
    assert changed.float().mean() > 0.9


def test_a_model_whose_file_unties_the_head_is_refused(tmp_path, capfd):
    from safetensors.torch import save_file

    model = make_wide_llama(tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file, metadata={"format": "pt"})
    run = train(tmp_path / "run", f"model.path={model}", *data_of(tmp_path))
    assert run.exit_code == 2
    assert "lm_head.weight" in capfd.readouterr().err


def test_a_prompt_and_completion_that_exceed_the_context_are_told_at_the_start(tmp_path, capfd):
    model = make_gpt2(tmp_path / "model")
    data = data_of(tmp_path, prompts=["x" * 60] * 4)
    run = train(tmp_path / "run", f"model.path={model}", *data, "data.too_long=error")
    assert run.exit_code == 2
    assert "60" in capfd.readouterr().err
    run = train(tmp_path / "run2", f"model.path={model}", *data, "data.too_long=cut_left")
    assert run.exit_code == 0
    assert all(len(row["prompt"]) == 56 for row in run.samples)
    run = train(tmp_path / "run3", f"model.path={model}", *data, "rollout.max_new_tokens=64")
    assert run.exit_code == 2
    assert "rollout.max_new_tokens=64" in capfd.readouterr().err


def test_a_folder_without_a_model_is_one_line(tmp_path, capfd):
    run = train(tmp_path / "run", f"model.path={tmp_path}")
    error = capfd.readouterr().err
    assert run.exit_code == 2
    assert f"model.path={tmp_path}" in error
    assert error.count("\n") == 1
