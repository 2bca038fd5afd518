"""Rewards by token ids: what counts as a match, and what may not count."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import jaxtyping
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asynctensorrlhf.rewards.token_match import TokenMatch, gpu_reward_simple, tensor_native_reward
from asynctensorrlhf.types import PromptRow, RewardInputs

CONFIG = Path(__file__).parents[2] / "conf" / "reward" / "token_match.yaml"
EOS, OTHER_EOS = 2, 3


def ids(*rows):
    return torch.tensor(rows)


def found(generated, pattern, eos=EOS):
    return tensor_native_reward(ids(generated), [torch.tensor(pattern, dtype=torch.long)], eos).item()


def equal(generated, answer, eos=EOS):
    return gpu_reward_simple(ids(generated), [torch.tensor(answer, dtype=torch.long)], eos).item()


class CharacterTokenizer:
    """Id of a character: 10 + its code point; `$` is the stop token 2."""

    def __call__(self, texts, **options):
        assert options == {"add_special_tokens": False}
        return {"input_ids": [[2 if char == "$" else 10 + ord(char) for char in text] for text in texts]}

    def decode(self, token_ids, **options):
        raise AssertionError("an id reward decodes nothing")


def row(**columns):
    return PromptRow(prompt_ids=torch.tensor([1]), text="?", columns=columns)


def match(mode="whole", stops=(EOS,)):
    return TokenMatch(mode=mode, answer_column="answer", stop_token_ids=stops)


def score(reward, answers, completions, lengths=None):
    """Scores of texts against answers, one each, as a rollout would hand them over."""
    tokenizer = CharacterTokenizer()
    encoded = reward.encode([row(answer=answer) for answer in answers], tokenizer)
    rows = [torch.tensor(line) for line in tokenizer(completions, add_special_tokens=False)["input_ids"]]
    lengths = torch.tensor([len(line) for line in rows] if lengths is None else lengths)
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    return reward(RewardInputs(padded, mask, torch.arange(len(rows)), encoded)).tolist()


@pytest.mark.parametrize(
    ("generated", "pattern", "reward"),
    [
        ([7, 4, 5, EOS], [4, 5], 1.0),
        ([4, 5, 7, EOS], [4, 5], 1.0),
        ([7, 4, 5], [4, 5], 1.0),
        ([4, 7, 5, EOS], [4, 5], 0.0),
        ([5, 4, EOS, 0], [4, 5], 0.0),
        ([7, EOS, 4, 5], [4, 5], 0.0),
        ([4, EOS, 5, 5], [4, 5], 0.0),
        ([EOS, 4, 5], [4, 5], 0.0),
        ([4, 4, 5, EOS], [4, 5], 1.0),
        ([4, 5], [4, 5, 6], 0.0),
        ([4, 5, EOS], [], 0.0),
        ([EOS, EOS], [], 0.0),
        ([4, 5, EOS], [EOS], 0.0),
        ([4, 5, EOS], [5, EOS], 1.0),
        ([0, 0, EOS], [0], 1.0),
        ([4], [4, 0], 0.0),
    ],
)
def test_a_pattern_counts_where_it_occurs_before_the_first_eos(generated, pattern, reward):
    assert found(generated, pattern) == reward


@pytest.mark.parametrize(
    ("generated", "answer", "reward"),
    [
        ([4, 5, EOS, 9], [4, 5], 1.0),
        ([4, 5], [4, 5], 1.0),
        ([4, 5, 6, EOS], [4, 5], 0.0),
        ([4, EOS, 5], [4, 5], 0.0),
        ([7, 4, 5, EOS], [4, 5], 0.0),
        ([4, 5], [4, 5, 6], 0.0),
        ([4, 5, EOS], [4, 5, EOS, EOS], 1.0),
        ([0, EOS], [0, 0], 0.0),
        ([EOS, 4], [4], 0.0),
        ([EOS, 4], [], 1.0),
    ],
)
def test_a_completion_counts_when_it_equals_the_answer_up_to_eos(generated, answer, reward):
    assert equal(generated, answer) == reward


@pytest.mark.parametrize("reward", [found, equal])
def test_the_first_of_several_eos_ids_ends_the_completion(reward):
    assert reward([4, OTHER_EOS, 9, EOS], [4], [EOS, OTHER_EOS]) == 1.0
    assert reward([OTHER_EOS, 4, EOS], [4], (EOS, OTHER_EOS)) == 0.0


def test_answers_are_read_alike_as_list_padded_tensor_lengths_or_one_for_all():
    generated = ids([4, 5, EOS, 0], [9, 4, 5, EOS], [5, 4, 4, 9])
    as_list = [torch.tensor([4, 5]), torch.tensor([5]), torch.tensor([9, 9, 9])]
    padded = ids([4, 5, -1], [5, -1, -1], [9, 9, 9])
    padded_with_junk = ids([4, 5, -100], [5, -1, 7], [9, 9, 9])
    padded_with_eos = ids([4, 5, EOS], [5, EOS, EOS], [9, 9, 9])
    with_zeros = ids([4, 5, 0], [5, 0, 0], [9, 9, 9])
    assert tensor_native_reward(generated, as_list, EOS).tolist() == [1.0, 1.0, 0.0]
    assert tensor_native_reward(generated, padded, EOS).tolist() == [1.0, 1.0, 0.0]
    assert tensor_native_reward(generated, padded_with_junk, EOS).tolist() == [1.0, 1.0, 0.0]
    assert tensor_native_reward(generated, padded_with_eos, EOS).tolist() == [1.0, 1.0, 0.0]
    lengths = torch.tensor([2, 1, 3])
    assert tensor_native_reward(generated, with_zeros, EOS, pattern_lengths=lengths).tolist() == [1.0, 1.0, 0.0]
    assert tensor_native_reward(generated, as_list[:1], EOS, device="cpu").tolist() == [1.0, 1.0, 0.0]
    assert tensor_native_reward(generated, padded[:1], EOS).dtype == torch.float32
    assert gpu_reward_simple(generated, as_list[:1], EOS).tolist() == [1.0, 0.0, 0.0]
    assert gpu_reward_simple(generated, padded_with_eos, EOS).tolist() == [1.0, 0.0, 0.0]


def test_answers_that_do_not_fit_the_completions_are_refused():
    with pytest.raises(ValueError, match="there must be 1 or 3 answers, got 2"):
        tensor_native_reward(torch.zeros(3, 4, dtype=torch.long), [torch.tensor([1])] * 2, EOS)


tokens = st.lists(st.integers(2, 5), max_size=6)


@given(generated=tokens, pattern=tokens, eos=st.sampled_from([(2,), (2, 3)]))
@settings(max_examples=100, deadline=None)
def test_both_agree_with_plain_python_lists(generated, pattern, eos):
    def before_eos(sequence):
        return sequence[: next((i for i, token in enumerate(sequence) if token in eos), len(sequence))]

    live, cut = before_eos(generated), before_eos(pattern)
    is_inside = any(live[start : start + len(cut)] == cut for start in range(len(live))) and bool(cut)
    batch, answers = torch.tensor([generated], dtype=torch.long), [torch.tensor(pattern, dtype=torch.long)]
    assert tensor_native_reward(batch, answers, eos).item() == is_inside
    assert gpu_reward_simple(batch, answers, eos).item() == (live == cut)


@pytest.mark.parametrize("mode", ["whole", "contains"])
@given(junk=st.lists(st.integers(-5, 200), min_size=4, max_size=4), text=st.sampled_from(["42", "4", "142", ""]))
@settings(max_examples=40, deadline=None)
def test_junk_after_the_stop_token_and_in_padding_changes_nothing(mode, junk, text):
    reward = match(mode)
    answers = reward.encode([row(answer="42")], CharacterTokenizer())
    live = torch.tensor([*CharacterTokenizer()([text + "$"], add_special_tokens=False)["input_ids"][0]])
    width = len(live)
    for num_sampled in (width, width + 4):  # junk as padding, and junk as sampled tokens after the stop
        completion = torch.cat([live, torch.tensor(junk)])[None]
        mask = torch.arange(width + 4)[None] < num_sampled
        batch = RewardInputs(completion, mask, torch.zeros(1, dtype=torch.long), answers)
        clean = replace(batch, completion_ids=live[None], completion_mask=mask[:, :width])
        assert torch.equal(reward(batch), reward(clean))


def test_a_truncated_completion_counts_up_to_its_mask():
    assert score(match(), ["42", "42"], ["42", "423"], lengths=[2, 2]) == [1.0, 1.0]
    assert score(match(), ["42", "42"], ["42", "423"], lengths=[1, 3]) == [0.0, 0.0]


def test_whole_and_contains_differ_as_documented():
    completions = ["4$", "42$", "-4$", "x$4"]
    assert score(match("whole"), ["4"] * 4, completions) == [1.0, 0.0, 0.0, 0.0]
    assert score(match("contains"), ["4"] * 4, completions) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", ["whole", "contains"])
def test_any_of_several_answers_counts_and_missing_ones_do_not(mode):
    answers = [["42", "forty-two", "x"], "7", "7"]
    assert score(match(mode), answers, ["forty-two$", "7$", "$"]) == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("mode", ["whole", "contains"])
def test_scores_do_not_depend_on_order_or_on_padding(mode):
    reward = match(mode)
    answers, completions = ["1", ["22", "3"], "333", "4"], ["1$", "3$", "33$", "xxxxx4$"]
    scores = score(reward, answers, completions)
    assert score(reward, answers[::-1], completions[::-1]) == scores[::-1]
    assert [score(reward, answers[i : i + 1], completions[i : i + 1])[0] for i in range(4)] == scores
    assert sum(scores) == (2.0 if mode == "whole" else 3.0)


def test_an_answer_counts_with_and_without_the_space_mark_that_starts_a_text():
    pieces = {"<unk>": 0, "\u2581Q": 1, "\u2581is": 2, "\u25814": 3, "4": 4, "Q": 5, "is": 6, "\u2581": 7}
    backend = Tokenizer(models.Unigram([(piece, -float(place)) for piece, place in pieces.items()], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    reward = match()
    answers = reward.encode([PromptRow(ids([1, 2])[0], "Q is", {"answer": "4"})], tokenizer)
    assert answers["answer_ids"].tolist() == [[[3], [4]]]
    completions = ids([3], [4], [6])
    batch = RewardInputs(completions, completions > 0, torch.zeros(3, dtype=torch.long), answers)
    assert reward(batch).tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("reward", [tensor_native_reward, gpu_reward_simple])
def test_answers_may_be_lists_or_one_for_all(reward):
    generated = ids([4, 5, EOS], [5, 4, EOS])
    for answers in ([[4, 5], [4, 5]], [torch.tensor([4, 5])], torch.tensor([4, 5])):
        assert reward(generated, answers, EOS).tolist() == [1.0, 0.0]


def test_encoded_answers_are_padded_and_end_before_their_stop_tokens():
    encoded = match().encode([row(answer="a"), row(answer=["bc$$", "e"])], CharacterTokenizer())
    a, b, c, e = (10 + ord(char) for char in "abce")
    assert encoded["answer_ids"].tolist() == [[[a, -1], [-1, -1]], [[b, c], [e, -1]]]
    assert encoded["answer_lengths"].tolist() == [[1, 0], [2, 1]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"target": "4", "level": 1}, "row 1 has no column 'answer'; it has target, level"),
        ({"answer": ""}, "'answer' of row 1 must have a token before any stop token and none after it, got ''"),
        (
            {"answer": ["4", "$4"]},
            r"'answer' of row 1 must have a token before any stop token and none after it, got '\$4'",
        ),
        ({"answer": "4$2$"}, r"must have a token before any stop token and none after it, got '4\$2\$'"),
        ({"answer": []}, r"'answer' of row 1 must be a text or a list of texts, got \[\]"),
        ({"answer": 4}, "'answer' of row 1 must be a text or a list of texts, got 4"),
    ],
    ids=["missing", "empty", "stopped", "cut by a stop", "no answers", "number"],
)
def test_a_bad_answer_is_an_error_naming_its_row(columns, message):
    with pytest.raises(ValueError, match=message):
        match().encode([row(answer="4"), row(**columns)], CharacterTokenizer())


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match=r"reward\.mode must be one of whole, contains, got 'exact'"):
        match("exact")


def test_the_config_has_every_setting_but_the_stop_tokens():
    config = yaml.safe_load(CONFIG.read_text())
    assert {field.name for field in fields(TokenMatch)} == {*config, "stop_token_ids"} - {"_target_", "_partial_"}


@pytest.mark.parametrize("reward", [tensor_native_reward, gpu_reward_simple])
def test_it_compiles_to_one_graph(reward):
    generated, answers = ids([4, 5, EOS, 0], [9, 4, 5, EOS]), ids([4, 5, -1], [5, -1, -1])
    compiled = torch.compile(lambda *tensors: reward(*tensors, [EOS, OTHER_EOS]), fullgraph=True, backend="aot_eager")
    jaxtyping.config.update("jaxtyping_disable", True)  # the compiler can't trace shape checks
    try:
        assert torch.equal(compiled(generated, answers), reward(generated, answers, [EOS, OTHER_EOS]))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("mode", ["whole", "contains"])
def test_it_never_asks_the_device_for_a_value(mode):
    ones = torch.ones(2, 3, dtype=torch.long, device="meta")  # whose tensors have no values
    answers = {"answer_ids": ones[:, None], "answer_lengths": ones[:, :1]}
    assert match(mode)(RewardInputs(ones, ones > 0, ones[:, 0], answers)).is_meta
    reward = {"whole": gpu_reward_simple, "contains": tensor_native_reward}[mode]
    assert reward(ones, ones, [EOS, OTHER_EOS]).is_meta


@pytest.mark.parametrize("eos", [EOS, [EOS], torch.tensor(EOS), torch.tensor([EOS])])
def test_every_way_to_write_an_eos_id_ends_a_completion(eos):
    assert found([9, EOS, 4], [4], eos) == 0.0
    assert equal([9, EOS, 4], [9], eos) == 1.0


def test_without_an_eos_id_the_whole_completion_counts():
    assert found([9, EOS, 4], [EOS, 4], None) == 1.0
    assert equal([9, EOS, 4], [9, EOS, 4], None) == 1.0
