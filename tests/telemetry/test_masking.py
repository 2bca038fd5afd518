from asynctensorrlhf.telemetry.masking import masked


def test_values_of_secret_keys_are_masked_at_any_depth():
    config = {"wandb": {"api_key": "made-up-123"}, "x": [{"token": "made-up-123"}], "password": 123456}
    assert masked(config, {}) == {"wandb": {"api_key": "***"}, "x": [{"token": "***"}], "password": "***"}


def test_ordinary_settings_are_left_alone():
    config = {
        "stop_token_ids": [1, 2],
        "micro_batch_tokens": 8192,
        "monkey": "x",
        "token": None,
        "kv": "keep",
        "dry_run": False,
        "lr": 3e-4,
    }
    assert masked(config, {"HOME": "keep"}) == config


def test_a_secret_copied_from_the_environment_is_masked_wherever_it_went():
    config = {"model": {"path": "https://user:made-up-123@host/m"}, "list": ["made-up-123"]}
    expected = {"model": {"path": "https://user:***@host/m"}, "list": ["***"]}
    assert masked(config, {"HUB_TOKEN": "made-up-123"}) == expected


def test_a_short_secret_does_not_eat_ordinary_text():
    assert masked({"data": {"path": "a/keep.jsonl"}}, {"SOME_KEY": "a"}) == {"data": {"path": "a/keep.jsonl"}}
