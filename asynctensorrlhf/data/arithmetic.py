"""Sums of two operands of one or two digits: the default job's prompts.

Knows the task and its held-out pairs; does not know models, rewards or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, product

import numpy as np
import torch

from asynctensorrlhf.data.order import epoch_order, fingerprint
from asynctensorrlhf.data.prompt_data import PromptData
from asynctensorrlhf.data.prompt_ids import PromptTokenizer, plain_ids
from asynctensorrlhf.data.template import Template, load_template
from asynctensorrlhf.types import PromptRow

_DIGITS = (range(10), range(10, 100))
_HELDOUT_SEED = 1024  # not the run's: every run holds out the same pairs and is evaluated on the same draws
_STREAM = 0x61726974  # keeps these random words apart from others made of the same seed

Pair = tuple[int, int]


class ArithmeticSource:
    """Pairs of operands in four classes (one or two digits each), drawn class first, each with even chance.

    Every draw is a pure function of seed and draw number, so any thread may ask for any of them.

    Attributes:
        rows: the pairs, class after class.
        num_draws: draws until the data ends; None = never.
        fingerprint: identity of rows and order; a resumed run compares it.
    """

    def __init__(self, classes: Sequence[Sequence[PromptRow]], *, seed: int, num_draws: int | None) -> None:
        self.rows: Sequence[PromptRow] = [row for rows in classes for row in rows]
        self.num_draws = num_draws
        self.fingerprint = fingerprint(self.rows, "answer", order=f"even classes, seed {seed}")
        self._seed = seed
        self._spans = list(pairwise(accumulate(map(len, classes), initial=0)))

    def row_id(self, draw: int) -> int:
        """The row that draw number `draw` (from 0) takes."""
        words = np.random.SeedSequence((self._seed, draw, _STREAM)).generate_state(2, np.uint64).tolist()
        start, end = self._spans[words[0] % len(self._spans)]
        return int(start + words[1] % (end - start))


def arithmetic(
    *,
    tokenizer: PromptTokenizer,
    seed: int,
    eval_draws: int,
    context_limit: int,
    num_draws: int | None,
    heldout_fraction: float,
    max_digits: int = 2,
    template: str | None = None,
) -> PromptData:
    """Prompts `a+b=`, their answer in column `answer`; held-out pairs and draws are the same for every seed.

    Args:
        tokenizer: of the model that is trained.
        seed: of the order of draws.
        eval_draws: draws of held-out pairs; 0: no evaluation.
        context_limit: tokens that the model's context leaves for a prompt.
        num_draws: draws until the data ends; None: never.
        heldout_fraction: share of the pairs held out within each class, in [0, 1); 0: no evaluation.
        max_digits: of an operand, 1 or 2.
        template: text that holds `{prompt}` once, such as worked examples before it; None: the sum alone.

    Raises:
        ValueError: a value is out of range, the template has no place for the prompt, or a prompt is longer than the
            context allows.
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"data.heldout_fraction must be in [0, 1), got {heldout_fraction}")
    if not 1 <= max_digits <= len(_DIGITS):
        raise ValueError(f"data.max_digits must be 1 or {len(_DIGITS)}, got {max_digits}")
    frame = load_template(template=template, template_file=None, prompt_column="prompt")
    operands = _DIGITS[:max_digits]
    classes = [list(product(*digits)) for digits in product(operands, operands)]
    pairs = [pair for members in classes for pair in members]
    rows = dict(zip(pairs, _rows(pairs, frame, tokenizer, context_limit), strict=True))
    heldout_pairs = {
        pair for index, members in enumerate(classes) for pair in _heldout(index, members, heldout_fraction)
    }
    train = ArithmeticSource(
        [[rows[pair] for pair in members if pair not in heldout_pairs] for members in classes],
        seed=seed,
        num_draws=num_draws,
    )
    counts = {"num_rows": len(train.rows), "num_heldout_rows": len(heldout_pairs)}
    if not (eval_draws and heldout_pairs):
        return PromptData(train, None, counts)
    heldout = ArithmeticSource(
        [[rows[pair] for pair in members if pair in heldout_pairs] for members in classes],
        seed=_HELDOUT_SEED,
        num_draws=eval_draws,
    )
    return PromptData(train, heldout, counts)


def _heldout(index: int, pairs: list[Pair], heldout_fraction: float) -> list[Pair]:
    """The pairs of class `index` that are held out: at least one and not all, unless the fraction is 0."""
    if not heldout_fraction:
        return []
    num_heldout = min(max(round(heldout_fraction * len(pairs)), 1), len(pairs) - 1)
    return [pairs[place] for place in epoch_order(len(pairs), _HELDOUT_SEED, index)[:num_heldout]]


def _rows(pairs: list[Pair], frame: Template | None, tokenizer: PromptTokenizer, context_limit: int) -> list[PromptRow]:
    """Rows of the pairs, tokenised in one call."""
    sums = [f"{a}+{b}=" for a, b in pairs]
    texts = [frame.fill(text) for text in sums] if frame is not None else sums
    all_ids = plain_ids(texts, tokenizer)
    longest = max(map(len, all_ids))
    if longest > context_limit:
        raise ValueError(
            f"prompts of data=arithmetic have up to {longest} tokens, the model's context leaves "
            f"{context_limit}: lower rollout.max_new_tokens"
        )
    return [
        PromptRow(torch.tensor(ids), text, {"prompt": sum_text, "answer": str(a + b)})
        for (a, b), sum_text, text, ids in zip(pairs, sums, texts, all_ids, strict=True)
    ]
