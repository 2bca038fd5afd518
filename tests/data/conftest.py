"""Toy tokenizers, built here, each with one habit that real ones have; and files of rows."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from asynctensorrlhf.data.jsonl import jsonl

TEXT = ["What is 12 + 7? Solve {x} in \\boxed{}.", "user assistant system tool", "aaa bbb ccc"]
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def ending_in(tokenizer, *, before="", after=""):
    """Add special tokens around every text, as a post-processor does."""
    pairs = [(token, tokenizer.token_to_id(token)) for token in {"<s>", "</s>"}]
    single = " ".join(part for part in (before, "$A", after) if part)
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pairs)
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "[user]", "[assistant]"]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


@pytest.fixture
def char_tokenizer():
    """One token a printable character; no post-processor, no chat template."""
    characters = ["<pad>", "<bos>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    vocab = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=256,
    )


@pytest.fixture
def bos_tokenizer():
    """Byte-level; a BOS before every text, and its chat template writes one too; saved without a limit."""
    return PreTrainedTokenizerFast(
        tokenizer_object=ending_in(byte_level(), before="<s>"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template="{{ bos_token }}" + TURNS,
    )


@pytest.fixture
def eos_tokenizer():
    """Metaspace, as sentencepiece has it; puts a BOS before and an EOS after every text; no pad token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<s>", "</s>", "<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=ending_in(tokenizer, before="<s>", after="</s>"),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@pytest.fixture
def one_token_tokenizer():
    """GPT-2's habit: one token is BOS, EOS and pad, and none is added."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level(),
        bos_token="</s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=TURNS,
    )


@pytest.fixture
def defaults(char_tokenizer):
    """The keys of a prompt file, as its YAML has them, and what a run adds."""
    return {
        "tokenizer": char_tokenizer,
        "seed": 3,
        "eval_draws": 8,
        "context_limit": 100,
        "heldout_path": None,
        "prompt_column": "prompt",
        "answer_column": "answer",
        "template": None,
        "template_file": None,
        "chat_template_kwargs": {},
        "max_prompt_tokens": None,
        "too_long": "drop",
        "num_epochs": None,
        "shuffle": True,
    }


@pytest.fixture
def write(tmp_path):
    """Write rows (texts stand for lines as they are) as a JSONL file; returns its path."""

    def call(name, rows):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_bytes("\n".join(lines).encode())
        return str(tmp_path / name)

    return call


@pytest.fixture
def load(tmp_path, defaults, write):
    """Load rows, or the bytes of a file, as a training file."""

    def call(content, **changes):
        if isinstance(content, bytes):
            (tmp_path / "my.jsonl").write_bytes(content)
        else:
            write("my.jsonl", content)
        return jsonl(**{**defaults, "path": str(tmp_path / "my.jsonl"), **changes})

    return call
