"""Token ids of a prompt, made once: what the engine and the trainer both see.

Knows special tokens, chat templates and the length limit; does not know files or columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from asynctensorrlhf.interfaces import Tokenizer

# Arguments of apply_chat_template that would change the kind of the result, or cut it outside data.too_long.
_OURS = frozenset(
    {
        "tokenize",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)


@runtime_checkable
class PromptTokenizer(Tokenizer, Protocol):
    """The part of a Hugging Face tokenizer that makes prompts."""

    bos_token_id: Any
    eos_token_id: Any
    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Ids of a conversation, when `tokenize` is true and `return_dict` false."""
        ...


def plain_ids(texts: Sequence[str], tokenizer: PromptTokenizer) -> list[list[int]]:
    """Ids of plain texts, with the special tokens the tokenizer puts before a text and no EOS put after it.

    At most one BOS leads a prompt, also when the text spells one itself. The tokenizer's own length limit is
    not consulted: one saved without a limit reports 10**30.
    """
    if not texts:
        return []
    batch = tokenizer(list(texts), return_attention_mask=False, verbose=False)["input_ids"]
    end = -1 if _appends_eos(tokenizer) else None
    bos = tokenizer.bos_token_id
    return [_with_one_bos(list(ids[:end]), bos) for ids in batch]


def chat_ids(messages: list[Any], tokenizer: PromptTokenizer, options: Mapping[str, Any]) -> list[int]:
    """Ids of a conversation as the chat template writes it: special tokens come from the template alone.

    Opens the assistant's turn, unless `options` say otherwise.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None and "chat_template" not in options:
        raise ValueError(
            "the prompt is a list of chat messages, but the tokenizer has no chat template; give plain text"
        )
    opens_turn = not options.get("continue_final_message")
    chosen = {"add_generation_prompt": opens_turn, **options, "tokenize": True, "return_dict": False}
    return _with_one_bos(list(tokenizer.apply_chat_template(messages, **chosen)), tokenizer.bos_token_id)


def check_chat_options(options: Mapping[str, Any]) -> None:
    """Refuse arguments of the chat template that make something else than the ids of the whole prompt."""
    if refused := sorted(_OURS.intersection(options)):
        raise ValueError(
            f"data.chat_template_kwargs must not set {', '.join(refused)}: the whole prompt is needed as ids"
        )


@dataclass(frozen=True)
class LengthLimit:
    """The one length rule of prompts, applied once, to the final ids.

    Attributes:
        num_tokens: longest prompt that is kept whole, at least 1.
        too_long: what happens to a longer one: `drop`, `cut_left` or `error`.
    """

    num_tokens: int
    too_long: str

    def __post_init__(self) -> None:
        if self.too_long not in {"drop", "cut_left", "error"}:
            raise ValueError(f"data.too_long must be drop, cut_left or error, got {self.too_long!r}")
        if self.num_tokens < 1:
            raise ValueError(
                f"prompts must be allowed at least 1 token, got {self.num_tokens}: raise "
                "data.max_prompt_tokens or lower rollout.max_new_tokens, so that the context leaves room"
            )

    def fit(self, ids: list[int], bos_token_id: int | None) -> list[int] | None:
        """The ids that are used; None when the row is dropped.

        A cut keeps the end of the prompt, and the BOS that led it.

        Raises:
            ValueError: the prompt is too long and `too_long` is `error`.
        """
        if len(ids) <= self.num_tokens:
            return ids
        if self.too_long == "drop":
            return None
        if self.too_long == "error":
            raise ValueError(
                f"the prompt has {len(ids)} tokens, allowed are {self.num_tokens} (the smaller of "
                "data.max_prompt_tokens and what the model's context leaves); drop and cut_left go on"
            )
        head = ids[:1] if ids[0] == bos_token_id and self.num_tokens > 1 else []
        return head + ids[len(ids) - self.num_tokens + len(head) :]


def _appends_eos(tokenizer: PromptTokenizer) -> bool:
    """Whether the tokenizer ends every text with an EOS, which would end a prompt before its completion."""
    bare, full = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    return bool(bare) and bare[-1] != tokenizer.eos_token_id == full[-1]


def _with_one_bos(ids: list[int], bos_token_id: int | None) -> list[int]:
    while len(ids) > 1 and ids[0] == ids[1] == bos_token_id:
        ids = ids[1:]
    return ids
