"""The three measurements of `atrlhf bench losses`, one after the other.

Knows their order and what the result holds; does not know how anything is measured or shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asynctensorrlhf.bench import job_share, loss_report, loss_times, machine, score_cost


def measure_and_show(counts: Mapping[str, int], *, output_dir: str, device: str, seed: int) -> None:
    """Measure, write `result.json`, print the tables.

    Args:
        counts: the checked integers of `atrlhf bench losses`, by key.
        output_dir: see `machine.result_path`.
        device: see `machine.device_of`.
        seed: of the random inputs.

    Raises:
        ConfigError: no such device, or a folder that can't be used.
    """
    on = machine.device_of(device)
    torch.set_num_threads(counts["num_threads"])
    path = machine.result_path(output_dir)
    profiles = {
        "A": {"num_samples": counts["num_samples"], "length": counts["length"]},
        "B": {"num_samples": counts["long_num_samples"], "length": counts["long_length"]},
    }
    shipped = loss_times.shipped_losses()
    result = {
        "machine": machine.describe(on),
        "settings": {**counts, "device": str(on), "seed": seed},
        "profiles": profiles,
        "losses": {
            name: loss_times.measure(shipped, **profile, num_pairs=counts["num_pairs"], seed=seed, device=on)
            for name, profile in profiles.items()
        },
        "scores": score_cost.measure(
            num_positions=(counts["long_num_samples"], counts["long_length"]),
            vocabulary_size=counts["vocabulary_size"],
            chunk_tokens=counts["chunk_tokens"],
            num_pairs=counts["num_score_pairs"],
            seed=seed,
            device=on,
        ),
        "default_job": job_share.measure(num_pairs=counts["num_job_pairs"], seed=seed, device=on),
    }
    machine.write_result(path, result)
    loss_report.show(result, path)
