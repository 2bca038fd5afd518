import pytest

from asynctensorrlhf.data.prompt_ids import LengthLimit, chat_ids, check_chat_options, plain_ids

USER = [{"role": "user", "content": "hi"}]


def test_a_plain_text_gets_the_one_bos_of_its_tokenizer(bos_tokenizer):
    (ids,) = plain_ids(["abc"], bos_tokenizer)
    assert ids[0] == bos_tokenizer.bos_token_id
    assert bos_tokenizer.decode(ids[1:]) == "abc"


def test_a_bos_spelt_in_the_text_is_not_doubled(bos_tokenizer):
    spelt, plain = plain_ids(["<s>abc", "abc"], bos_tokenizer)
    assert spelt == plain


def test_a_bos_inside_the_text_stays(bos_tokenizer):
    (ids,) = plain_ids(["a<s><s>b"], bos_tokenizer)
    assert ids.count(bos_tokenizer.bos_token_id) == 3


def test_no_bos_is_invented(char_tokenizer, one_token_tokenizer):
    assert char_tokenizer.bos_token_id not in plain_ids(["abc"], char_tokenizer)[0]
    assert one_token_tokenizer.bos_token_id not in plain_ids(["abc"], one_token_tokenizer)[0]


def test_an_eos_put_after_every_text_does_not_end_the_prompt(eos_tokenizer):
    (ids,) = plain_ids(["aaa bbb"], eos_tokenizer)
    assert eos_tokenizer("aaa bbb")["input_ids"] == [*ids, eos_tokenizer.eos_token_id]
    assert eos_tokenizer.decode(ids, skip_special_tokens=True) == "aaa bbb"


def test_an_eos_that_the_text_spells_stays(eos_tokenizer, bos_tokenizer):
    for tokenizer in (eos_tokenizer, bos_tokenizer):
        (ids,) = plain_ids(["aaa</s>"], tokenizer)
        assert ids.count(tokenizer.eos_token_id) == 1


def test_ids_do_not_depend_on_the_neighbours(bos_tokenizer):
    texts = ["a", "aaa bbb ccc", "What is 12 + 7?"]
    assert plain_ids(texts, bos_tokenizer) == [plain_ids([text], bos_tokenizer)[0] for text in texts]


def test_a_tokenizer_without_a_limit_takes_a_long_text(bos_tokenizer):
    assert bos_tokenizer.model_max_length > 10**9
    assert len(plain_ids(["x y" * 500], bos_tokenizer)[0]) > 500


def test_a_text_over_the_tokenizers_own_limit_is_not_cut(char_tokenizer):
    assert len(plain_ids(["x" * 300], char_tokenizer)[0]) == 300


def test_a_chat_template_that_writes_bos_gives_exactly_one(bos_tokenizer):
    ids = chat_ids(USER, bos_tokenizer, {})
    assert ids.count(bos_tokenizer.bos_token_id) == 1
    assert bos_tokenizer.decode(ids) == "<s>[user]hi[assistant]"
    assert all(type(token) is int for token in ids)


def test_a_chat_template_alone_decides_about_special_tokens(eos_tokenizer):
    ids = chat_ids(USER, eos_tokenizer, {"chat_template": "aaa {{ messages[0].content }}"})
    assert eos_tokenizer.bos_token_id not in ids
    assert eos_tokenizer.eos_token_id not in ids


def test_chat_options_reach_the_template(bos_tokenizer):
    template = "{{ messages[0].content }}{% if think %} aaa{% endif %}"
    ids = chat_ids(USER, bos_tokenizer, {"chat_template": template, "think": True})
    assert bos_tokenizer.decode(ids) == "hi aaa"


def test_the_assistants_turn_is_opened_unless_told_otherwise(bos_tokenizer):
    closed = chat_ids(USER, bos_tokenizer, {"add_generation_prompt": False})
    assert bos_tokenizer.decode(closed) == "<s>[user]hi"
    begun = [*USER, {"role": "assistant", "content": "aaa"}]
    continued = chat_ids(begun, bos_tokenizer, {"continue_final_message": True})
    assert bos_tokenizer.decode(continued) == "<s>[user]hi[assistant]aaa"


def test_messages_without_a_chat_template_are_refused(char_tokenizer):
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        chat_ids(USER, char_tokenizer, {})


def test_chat_options_that_would_cut_or_change_the_result_are_refused():
    check_chat_options({"enable_thinking": False})
    with pytest.raises(ValueError, match=r"data\.chat_template_kwargs must not set max_length, truncation"):
        check_chat_options({"truncation": True, "max_length": 5, "enable_thinking": False})


@pytest.mark.parametrize("too_long", ["drop", "cut_left", "error"])
def test_a_prompt_at_exactly_the_limit_is_kept_whole(too_long):
    assert LengthLimit(3, too_long).fit([1, 2, 3], 1) == [1, 2, 3]


def test_drop_drops_what_is_one_token_too_long():
    assert LengthLimit(3, "drop").fit([1, 2, 3, 4], 1) is None


def test_a_cut_keeps_the_end_and_the_bos():
    assert LengthLimit(3, "cut_left").fit([1, 2, 3, 4, 5], 1) == [1, 4, 5]
    assert LengthLimit(3, "cut_left").fit([2, 1, 3, 4, 5], 1) == [3, 4, 5]
    assert LengthLimit(3, "cut_left").fit([2, 1, 3, 4, 5], None) == [3, 4, 5]


def test_a_cut_to_one_token_keeps_the_last_one():
    assert LengthLimit(1, "cut_left").fit([1, 2, 3], 1) == [3]


def test_error_names_both_lengths():
    with pytest.raises(ValueError, match=r"has 4 tokens, allowed are 3"):
        LengthLimit(3, "error").fit([1, 2, 3, 4], 1)


def test_a_limit_without_room_and_an_unknown_policy_are_refused():
    with pytest.raises(ValueError, match=r"at least 1 token, got 0.*rollout\.max_new_tokens"):
        LengthLimit(0, "drop")
    with pytest.raises(ValueError, match=r"data\.too_long must be drop, cut_left or error, got 'cut'"):
        LengthLimit(5, "cut")
