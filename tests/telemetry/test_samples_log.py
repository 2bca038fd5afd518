import json

import pytest
import torch

from asynctensorrlhf.telemetry.samples_log import SamplesLog
from asynctensorrlhf.types import Prompt, Sample, SampleGroup, Ticket


def make_group(group_id, rewards, versions, finish_reason="stop"):
    prompt = Prompt(group_id, 0, torch.tensor([7, group_id]), Ticket(group_id, 0))
    samples = tuple(
        Sample(
            prompt=prompt,
            sample_index=index,
            completion_ids=torch.tensor([100 * group_id + index] * len(token_versions)),
            behaviour_logprobs=torch.zeros(len(token_versions)),
            token_versions=torch.tensor(token_versions),
            finish_reason=finish_reason,
        )
        for index, token_versions in enumerate(versions)
    )
    every = [version for token_versions in versions for version in token_versions]
    scores = torch.tensor(rewards)
    return SampleGroup(prompt, samples, scores, torch.zeros(len(rewards)), min(every), max(every))


def decode(prompts, completions):
    return [(f"P{prompt}", f"C{completion}\u2028") for prompt, completion in zip(prompts, completions, strict=True)]


def rows_of(path):
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_a_row_tells_the_versions_of_its_own_tokens_and_its_own_staleness(tmp_path):
    log = SamplesLog(tmp_path / "samples.jsonl", decode=decode, per_step=None)
    log.append(9, [make_group(4, [0.25, float("nan")], [[5, 6, 6], [7]])], 8)
    log.close()
    first, second = rows_of(tmp_path / "samples.jsonl")
    assert first == {
        "step": 9,
        "group_id": 4,
        "sample_index": 0,
        "prompt": "P[7, 4]",
        "completion": "C[400, 400, 400]\u2028",
        "completion_ids": [400, 400, 400],
        "reward": 0.25,
        "min_policy_version": 5,
        "max_policy_version": 6,
        "trained_version": 8,
        "staleness": 3,
        "finish_reason": "stop",
    }
    assert (second["completion_ids"], second["reward"], second["staleness"]) == ([401], None, 1)


@pytest.mark.parametrize(
    ("per_step", "expected"),
    [
        (None, [(1, 0), (1, 1), (2, 0), (2, 1)]),
        (0, []),
        (1, [(1, 0)]),
        (3, [(1, 0), (2, 0), (1, 1)]),
        (9, [(1, 0), (2, 0), (1, 1), (2, 1)]),
    ],
)
def test_a_limited_number_of_samples_covers_as_many_groups_as_it_can(tmp_path, per_step, expected):
    log = SamplesLog(tmp_path / "samples.jsonl", decode=decode, per_step=per_step)
    log.append(1, [make_group(1, [0.5, 0.1], [[0], [0]]), make_group(2, [0.5, 0.1], [[0], [0]])], 0)
    log.close()
    assert [(row["group_id"], row["sample_index"]) for row in rows_of(tmp_path / "samples.jsonl")] == expected


def test_a_step_that_cannot_be_decoded_leaves_no_row(tmp_path):
    log = SamplesLog(tmp_path / "samples.jsonl", decode=lambda prompts, completions: [("p", "c")], per_step=None)
    with pytest.raises(ValueError, match="zip"):
        log.append(1, [make_group(1, [0.5, 0.1], [[0], [0]])], 0)
    log.close()
    assert rows_of(tmp_path / "samples.jsonl") == []
