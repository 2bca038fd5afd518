"""`atrlhf bench losses`: what losses, log-probabilities and entropies cost.

Knows the settings and what they may be; imports what measures when it starts.
"""

from __future__ import annotations

from asynctensorrlhf.composition.errors import ConfigError


def losses(
    *,
    output_dir: str = "outputs/bench/%Y-%m-%d/%H-%M-%S",
    num_pairs: int = 15,
    num_score_pairs: int = 3,
    num_job_pairs: int = 7,
    num_threads: int = 1,
    device: str = "cpu",
    seed: int = 0,
    num_samples: int = 64,
    length: int = 256,
    long_num_samples: int = 4,
    long_length: int = 512,
    vocabulary_size: int = 50_000,
    chunk_tokens: int = 128,
) -> None:
    """Time of every loss against PPO; time and memory of log-probs and entropy; the loss's share of the default job.

    Args:
        output_dir: folder of result.json, with date and time filled in; one that holds a result is refused.
        num_pairs: measurements of each loss, each next to one of PPO. [int >= 1]
        num_score_pairs: measurements of chunked log-probs and entropy, each next to a naive one. [int >= 1]
        num_job_pairs: measurements of the default job's pass, each next to one of its loss alone. [int >= 1]
        num_threads: torch threads. [int >= 1]
        device: cpu, cuda or cuda:N; the default job's pass, too.
        seed: of the random inputs.
        num_samples: of profile A, for the losses. [int >= 1]
        length: tokens of each sample of profile A. [int >= 1]
        long_num_samples: of profile B, for the losses and for log-probs and entropy. [int >= 1]
        long_length: tokens of each sample of profile B. [int >= 1]
        vocabulary_size: of profile B. [int >= 2]
        chunk_tokens: positions whose scores the chunked form holds at once. [int >= 1]
    """
    counts = {
        "num_pairs": num_pairs,
        "num_score_pairs": num_score_pairs,
        "num_job_pairs": num_job_pairs,
        "num_threads": num_threads,
        "num_samples": num_samples,
        "length": length,
        "long_num_samples": long_num_samples,
        "long_length": long_length,
        "vocabulary_size": vocabulary_size,
        "chunk_tokens": chunk_tokens,
    }
    for key, value in counts.items():
        if value < (smallest := 2 if key == "vocabulary_size" else 1):
            raise ConfigError(f"{key}={value}: must be an int >= {smallest}")
    from asynctensorrlhf.bench import loss_run  # torch: not for a help text

    loss_run.measure_and_show(counts, output_dir=output_dir, device=device, seed=seed)
