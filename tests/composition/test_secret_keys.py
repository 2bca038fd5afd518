import pytest

from asynctensorrlhf.composition.errors import ConfigError
from asynctensorrlhf.composition.secret_keys import refuse_secrets_in, refuse_secrets_of

SECRETS = [
    "wandb.api_key=made-up-123",
    "+x.token=made-up-123",
    "++x.y.HF_TOKEN=made-up-123",
    "+x={inner: {password: made-up-123}}",
    "+x={a: 1, 'client_secret': made-up-123}",
    "hydra.job.env_set.WANDB_API_KEY=made-up-123",
    "+key=made-up-123",
]


@pytest.mark.parametrize("override", SECRETS)
def test_a_secret_is_refused_with_its_key_and_without_its_value(override: str) -> None:
    with pytest.raises(ConfigError, match="WANDB_API_KEY") as caught:
        refuse_secrets_of([override])
    assert "made-up-123" not in str(caught.value)


def test_names_that_only_sound_like_one_are_taken() -> None:
    refuse_secrets_of(["rollout.stop_token_ids=[1]", "trainer.micro_batch_tokens=5", "rollout.max_new_tokens=6"])
    refuse_secrets_in({"data": {"chat_template_kwargs": {"eos_token": "</s>", "monkey": 1, "tokenizer": "x"}}})


def test_a_secret_in_a_file_is_found_at_any_depth() -> None:
    with pytest.raises(ConfigError, match=r"^a\.b\.0\.api_key: looks like a secret"):
        refuse_secrets_in({"a": {"b": [{"api_key": "made-up-123"}]}})
