import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from asynctensorrlhf.warm_start import tiny_llama_path
from asynctensorrlhf.warm_start.make_tiny_llama import (
    IGNORED_LABEL,
    build_model,
    build_tokenizer,
    corrupt,
    draw_problem,
    draw_rows,
    measure_accuracy,
)


@pytest.fixture(scope="module")
def shipped():
    return (
        AutoModelForCausalLM.from_pretrained(tiny_llama_path()).eval(),
        AutoTokenizer.from_pretrained(tiny_llama_path()),
    )


def test_shipped_model_samples_a_third_right_and_decodes_nine_tenths(shipped):
    model, tokenizer = shipped
    assert 0.30 < measure_accuracy(model, tokenizer, num_draws=512, is_greedy=False) < 0.43
    assert 0.85 < measure_accuracy(model, tokenizer, num_draws=512, is_greedy=True) < 0.95


def test_shipped_files_are_of_the_recipe(shipped):
    model, tokenizer = shipped
    made = build_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    described = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    ours, theirs = (
        {key: value for key, value in config.to_dict().items() if key not in described}
        for config in (build_model(made).config, model.config)
    )
    assert ours == theirs


def test_labels_cover_the_answer_and_its_end_only():
    tokenizer = build_tokenizer()
    ids, labels = draw_rows(random.Random(3), tokenizer, noise=0.0)
    for row, row_labels in zip(ids, labels, strict=True):
        prompt, _, answer = tokenizer.decode(row).split("<eos>")[0].partition("=")
        assert str(sum(map(int, prompt.split("+")))) == answer
        trained = row_labels != IGNORED_LABEL
        assert tokenizer.decode(row_labels[trained]) == answer + "<eos>"
        assert trained.nonzero().flatten()[0] == len(prompt) + 1


def test_corrupt_gives_wrong_answers_that_are_numbers():
    rng = random.Random(5)
    answers = [draw_problem(rng)[1] for _ in range(400)]
    wrong = [corrupt(rng, answer) for answer in answers]
    assert all(text.isdigit() for text in wrong)
    # A redrawn digit may be the old one (a tenth of 30 %), and 0 is kept from going below 0.
    assert sum(text != answer for text, answer in zip(wrong, answers, strict=True)) > 360
