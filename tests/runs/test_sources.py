"""What only the files of model and data can tell is told before any weight is loaded, in one line."""

import json

import pytest
from transformers import MambaConfig

from tests.runs.running import train
from tests.runs.test_models import byte_level_tokenizer, make_gpt2

TINY = {"prompt": "1+1=", "gold": "2"}


def jsonl(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ("data=jsonl", f"data.path={path}")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (("data.answer_column=gold",), ("reward.answer_column", "'answer'", "it has prompt, gold")),
        (("data.answer_column=null",), ("reward.answer_column", "'answer'", "it has prompt, gold")),
        (
            ("data.answer_column=gold", "reward.answer_column=gold", "rollout.stop_token_ids=[99999]"),
            ("rollout.stop_token_ids=[99999]", "the ids 0 to 99"),
        ),
    ],
)
def test_answers_and_stop_tokens_that_cannot_be_used_are_refused(tmp_path, capfd, overrides, fragments, dry_run):
    run = train(tmp_path / "run", *jsonl(tmp_path, TINY), *overrides, f"dry_run={dry_run}")
    error = capfd.readouterr().err
    assert run.exit_code == 2
    assert error.count("\n") == 1, error
    assert all(fragment in error for fragment in fragments), error


def test_an_escaped_dollar_reaches_the_prompt_as_it_is_meant(tmp_path):
    options = (*jsonl(tmp_path, {"prompt": "2{x}", "answer": "4"}), r"data.template='\${x}+{prompt}='")
    run = train(tmp_path / "run", *options, "trainer.num_steps=1", f"model.path={make_gpt2(tmp_path / 'model')}")
    assert run.exit_code == 0
    assert {row["prompt"] for row in run.samples} == {"${x}+2{x}="}


def test_a_model_without_a_limit_on_positions_is_one_line(tmp_path, capfd):
    MambaConfig(vocab_size=258).save_pretrained(tmp_path / "model")
    byte_level_tokenizer().save_pretrained(tmp_path / "model")
    run = train(tmp_path / "run", f"model.path={tmp_path / 'model'}")
    error = capfd.readouterr().err
    assert run.exit_code == 2
    assert "how many positions" in error
    assert error.count("\n") == 1
