"""The tables of `atrlhf bench losses`.

Knows how figures are shown, with their units; does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PLAIN_WIDTH = 110


def show(result: Mapping[str, Any], path: Path) -> None:
    """Print what was measured and where it is written."""
    console = Console()
    console = console if console.is_terminal else Console(width=PLAIN_WIDTH)
    machine, settings = result["machine"], result["settings"]
    console.print(
        f"{machine['processor']}, {machine['device']}, {machine['num_threads']} of {machine['num_cores']} cores used, "
        f"torch {machine['torch']}"
    )
    console.print(_losses(result))
    console.print(_scores(result["scores"], settings))
    job = result["default_job"]
    console.print(
        f"default job, {job['num_samples']} samples, {job['num_tokens']} tokens, medians of "
        f"{settings['num_job_pairs']} pairs: loss {job['loss_median_ms']:.2f} ms of {job['pass_median_ms']:.1f} ms "
        f"forward and backward = {job['loss_share_percent']:.2f} %"
    )
    console.print(f"result: {path}", soft_wrap=True)


def _losses(result: Mapping[str, Any]) -> Table:
    profiles = result["profiles"]
    table = Table(
        title=f"Forward + backward of a loss, plan included: median ms of {result['settings']['num_pairs']} pairs, "
        "median ratio to ppo beside it",
        title_justify="left",
    )
    table.add_column("loss")
    for name, profile in profiles.items():
        table.add_column(f"{name}: {profile['num_samples']} x {profile['length']}, ms", justify="right")
        table.add_column("x ppo", justify="right")
    for loss in result["losses"]["A"]:
        cells = (
            (f"{figures['median_ms']:.3f}", f"{figures['ratio']:.2f}")
            for figures in (result["losses"][name][loss] for name in profiles)
        )
        table.add_row(loss, *(text for pair in cells for text in pair))
    return table


def _scores(scores: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    shape = " x ".join(map(str, scores["logits_shape"]))
    table = Table(
        title=f"Log-probs and entropy of float32 logits {shape} ({scores['logits_mb']:.0f} MB), chunks of "
        f"{settings['chunk_tokens']}: medians of {settings['num_score_pairs']} pairs; peak memory beyond the logits",
        title_justify="left",
    )
    for column in ("gradient of", "naive s", "chunked s", "chunked / naive", "naive x logits", "chunked x logits"):
        table.add_column(column, justify="left" if column == "gradient of" else "right")
    for key, label in (("logprobs", "log-probs"), ("logprobs_and_entropy", "log-probs and entropy")):
        figures = scores[key]
        table.add_row(
            label,
            f"{figures['naive_median_s']:.3f}",
            f"{figures['chunked_median_s']:.3f}",
            f"{figures['time_ratio']:.2f}",
            f"{figures['naive_peak_of_logits']:.2f}",
            f"{figures['chunked_peak_of_logits']:.2f}",
        )
    return table
