import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asynctensorrlhf.telemetry.texts import completion_text, decoded_pairs


@pytest.fixture
def metaspace():
    """The SentencePiece habit: the space mark that starts a list is dropped."""
    vocab = {"<unk>": 0, "</s>": 1, "\u2581Q": 2, "\u2581is": 3, "\u25814": 4, "4": 5}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


@pytest.fixture
def byte_level():
    """One token a byte, so that a character may be cut in two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_the_first_space_of_a_completion_is_kept(metaspace):
    assert completion_text(metaspace, [2, 3], [4, 1]) == " 4"
    assert completion_text(metaspace, [2, 3], [5]) == "4"
    (spaced, plain) = decoded_pairs(metaspace, [[2, 3], [2, 3]], [[4], [5]])
    assert ("".join(spaced), "".join(plain)) == ("Q is 4", "Q is4")


def test_a_completion_that_starts_within_a_character_is_decoded_alone(byte_level):
    ids = byte_level("a\u20ac!")["input_ids"]
    assert completion_text(byte_level, ids[:2], ids[2:]) == byte_level.decode(ids[2:])
    assert completion_text(byte_level, ids[:1], ids[1:]) == "\u20ac!"


class CleaningTokenizer:
    """Cleans spaces up unless told otherwise, as WordPiece tokenizers do."""

    def __call__(self, text, **options):
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens=False, clean_up_tokenization_spaces=True):
        text = " ".join(("What", "is", ".", "so")[token] for token in token_ids)
        return text.replace(" .", ".") if clean_up_tokenization_spaces else text


def test_spaces_are_not_cleaned_up_across_the_border():
    assert decoded_pairs(CleaningTokenizer(), [[0, 1]], [[2, 3]]) == [("What is", " . so")]
