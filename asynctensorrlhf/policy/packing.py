"""Where each token of a micro-batch goes, so that a prompt is computed once and hardly a column is padding.

Knows rows, columns and who may see whom; does not know the model.

With shared prompts a *tree* is a prompt followed by the inputs of its completions, one after the other; each completion
sees the prompt and itself, so the pass is exact. Short trees share rows:

    row 0:  p p p p a a b c c c | q q q d e e       a, b, c complete p;  d, e complete q
    row 1:  r r r r r r f f f f f f g g g
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from asynctensorrlhf.types import TrainBatch

# Rows narrower than this cost more in calls than they save in attention (measured with 4 layers of 128 on one core).
MIN_ROW_COLUMNS = 64


@dataclass(frozen=True)
class PackedRows:
    """Inputs of one forward pass, and where to read it.

    Attributes:
        input_ids: 0 on padding.
        position_ids: place of each token in its own sequence.
        attention_mask: True = may be seen; None when plain causal attention is enough.
        sources: flat column whose hidden state predicts each completion token, samples in order.
        targets: those tokens.
    """

    input_ids: Int[Tensor, "row column"]
    position_ids: Int[Tensor, "row column"]
    attention_mask: Bool[Tensor, "row 1 column column"] | None
    sources: Int[Tensor, " token"]
    targets: Int[Tensor, " token"]


@dataclass(frozen=True)
class _Tree:
    """A prompt and the samples that follow it."""

    prompt: int
    samples: list[int]
    num_columns: int


def pack(batch: TrainBatch, *, share_prompt: bool) -> PackedRows:
    """Lay a micro-batch out in rows; with `share_prompt` off every sample has a row and a prompt of its own."""
    prompt_lengths = batch.prompt_lengths.tolist()
    # the last token of a completion predicts nothing that is trained, so it is no input
    input_lengths = [length - 1 for length in batch.completion_lengths.tolist()]
    prompts = batch.prompt_index.tolist()
    longest = max(prompt_lengths[prompt] + inputs for prompt, inputs in zip(prompts, input_lengths, strict=True))
    # wider trees would share more of the prompt, but attention grows with the width: at most twice the plain pass
    limit = max(MIN_ROW_COLUMNS, 2 * longest) if share_prompt else 0
    trees = _grow_trees(prompts, prompt_lengths, input_lengths, limit)
    places = _first_fit(trees, MIN_ROW_COLUMNS) if share_prompt else [(row, 0) for row in range(len(trees))]
    num_rows = 1 + max(row for row, _ in places)
    num_columns = max(start + tree.num_columns for (_, start), tree in zip(places, trees, strict=True))

    tree_starts = [row * num_columns + start for row, start in places]
    tree_of, sample_starts = [0] * len(prompts), [0] * len(prompts)
    for index, tree in enumerate(trees):
        start = tree_starts[index] + prompt_lengths[tree.prompt]
        for sample in tree.samples:
            tree_of[sample], sample_starts[sample] = index, start
            start += input_lengths[sample]
    layout = torch.tensor([tree_starts, [tree.prompt for tree in trees]], device=batch.prompt_ids.device)
    samples = torch.tensor([tree_of, sample_starts], device=batch.prompt_ids.device)
    return _fill(batch, layout, samples, (num_rows, num_columns), has_one_sequence_a_row=not share_prompt)


def _grow_trees(prompts: list[int], prompt_lengths: list[int], input_lengths: list[int], limit: int) -> list[_Tree]:
    """Samples of one prompt in as few trees as `limit` columns allow; a longer single sample has its own."""
    trees: list[_Tree] = []
    newest: dict[int, int] = {}
    for sample, (prompt, num_inputs) in enumerate(zip(prompts, input_lengths, strict=True)):
        index = newest.get(prompt)
        if index is not None and trees[index].num_columns + num_inputs <= limit:
            tree = trees[index]
            trees[index] = _Tree(prompt, [*tree.samples, sample], tree.num_columns + num_inputs)
        else:
            newest[prompt] = len(trees)
            trees.append(_Tree(prompt, [sample], prompt_lengths[prompt] + num_inputs))
    return trees


def _first_fit(trees: list[_Tree], min_columns: int) -> list[tuple[int, int]]:
    """Row and first column of each tree: the widest first, each in the first row with room."""
    num_columns = max(min_columns, *(tree.num_columns for tree in trees))
    used: list[int] = []
    places = [(0, 0)] * len(trees)
    for index in sorted(range(len(trees)), key=lambda index: -trees[index].num_columns):
        width = trees[index].num_columns
        row = next((row for row, taken in enumerate(used) if taken + width <= num_columns), len(used))
        if row == len(used):
            used.append(0)
        places[index] = (row, used[row])
        used[row] += width
    return places


def _fill(
    batch: TrainBatch,
    layout: Int[Tensor, "2 tree"],
    samples: Int[Tensor, "2 sample"],
    shape: tuple[int, int],
    *,
    has_one_sequence_a_row: bool,
) -> PackedRows:
    tree_starts, tree_prompts = layout
    tree_of, sample_starts = samples
    prompt_lengths = batch.prompt_lengths[tree_prompts]
    input_ids, position_ids = batch.prompt_ids.new_zeros(2, shape[0] * shape[1])
    # padding is a tree of its own: nothing sees it, and it sees itself, so that no row of the softmax is empty
    trees, owners = torch.full_like(input_ids, -1), torch.full_like(input_ids, -1)

    tree, token = _positions(prompt_lengths)
    columns = tree_starts[tree] + token
    input_ids[columns], position_ids[columns], trees[columns] = batch.prompt_ids[tree_prompts[tree], token], token, tree

    sample, token = _positions(batch.completion_lengths - 1)
    columns = sample_starts[sample] + token
    input_ids[columns] = batch.completion_ids[sample, token]
    position_ids[columns] = prompt_lengths[tree_of[sample]] + token
    trees[columns], owners[columns] = tree_of[sample], sample

    sample, token = _positions(batch.completion_lengths)
    prompt_ends = (tree_starts + prompt_lengths - 1)[tree_of[sample]]
    return PackedRows(
        input_ids=input_ids.view(shape),
        position_ids=position_ids.view(shape),
        attention_mask=None if has_one_sequence_a_row else _visible(trees.view(shape), owners.view(shape)),
        sources=torch.where(token == 0, prompt_ends, sample_starts[sample] + token - 1),
        targets=batch.completion_ids[sample, token],
    )


def _positions(lengths: Int[Tensor, " row"]) -> tuple[Tensor, Tensor]:
    """Row and place of every token of rows of these lengths, row by row."""
    rows = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return rows, torch.arange(len(rows), device=lengths.device) - starts[rows]


def _visible(
    trees: Int[Tensor, "row column"], owners: Int[Tensor, "row column"]
) -> Bool[Tensor, "row 1 column column"]:
    """Earlier tokens of the same tree that are prompt (owner -1) or of the same sample."""
    same_tree = trees[:, :, None] == trees[:, None, :]
    shared_or_own = (owners[:, None, :] == -1) | (owners[:, :, None] == owners[:, None, :])
    return (same_tree & shared_or_own).tril()[:, None]
