import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
)

from asynctensorrlhf.policy.support import check_support
from tests.policy.tiny import tiny_model

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def make(config: PretrainedConfig, **options: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).eval()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_plain_decoders_are_supported(family: str) -> None:
    check_support(tiny_model(family), num_positions=64)


def test_a_window_shorter_than_the_sequences_is_refused_and_a_longer_one_not() -> None:
    model = make(MistralConfig(**SHAPE, sliding_window=16))
    check_support(model, num_positions=16)
    with pytest.raises(ValueError, match="window of 16 tokens is shorter than the 17 tokens"):
        check_support(model, num_positions=17)


def test_recurrent_layers_are_refused() -> None:
    model = make(MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1))
    with pytest.raises(ValueError, match="recurrent layers"):
        check_support(model, num_positions=16)


def test_a_model_that_takes_no_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no position_ids"):
        check_support(make(BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4)), num_positions=16)


def test_logits_that_are_scaled_after_the_head_are_refused() -> None:
    with pytest.raises(ValueError, match="not its head applied to its hidden states"):
        check_support(make(CohereConfig(**SHAPE, logit_scale=0.25)), num_positions=16)


def test_attention_that_misreads_masks_is_refused() -> None:
    # eager attention adds the mask to the scores, so True and False mean +1 and 0
    with pytest.raises(ValueError, match=r"does not follow the masks .* eager"):
        check_support(make(tiny_model("llama").config, attn_implementation="eager"), num_positions=16)


def test_a_family_that_fails_on_masks_is_refused_in_words() -> None:
    config = FalconConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    with pytest.raises(ValueError, match="FalconForCausalLM is not supported: it fails on the masks and positions"):
        check_support(make(config), num_positions=16)
