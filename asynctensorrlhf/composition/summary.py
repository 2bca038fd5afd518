"""What a run comes to, in one record.

Knows the fields of `summary.json`; does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asynctensorrlhf.composition.build import Parts
from asynctensorrlhf.composition.resume import ResumePoint
from asynctensorrlhf.trainer.progress import Progress

NO_GROUPS: dict[str, Any] = {"drawn": 0, "trained": 0, "held": 0, "in_flight": 0, "dropped": {}}


def summarise(parts: Parts | None, resume: ResumePoint | None, stop_reason: str, run_dir: Path) -> dict[str, Any]:
    """The summary of a run that ended for `stop_reason`; `parts` is None when it never started.

    `train_wall_s` covers the training loop without evaluations, `completion_tokens` what was trained; counts are
    cumulative from step 0 over resumes.
    """
    progress, groups = _done(parts, resume)
    seconds = progress.train_wall_s
    return {
        "accuracy_before": progress.accuracy_before,
        "accuracy_after": progress.accuracy_after,
        "greedy_before": progress.greedy_before,
        "greedy_after": progress.greedy_after,
        "train_wall_s": round(seconds, 3),
        "num_steps": progress.num_steps,
        "completion_tokens": progress.completion_tokens,
        "completion_tokens_per_s": round(progress.completion_tokens / seconds, 1) if seconds else None,
        "max_staleness_seen": progress.max_staleness_seen,
        "stop_reason": stop_reason,
        "groups": groups,
        "machine": parts.machine if parts is not None else {},
        "output_dir": str(run_dir),
    }


def _done(parts: Parts | None, resume: ResumePoint | None) -> tuple[Progress, dict[str, Any]]:
    """Progress and groups of the run; what its checkpoint says when it broke off before it started."""
    if parts is not None:
        return parts.progress, parts.report()
    return (resume.progress, resume.groups) if resume is not None else (Progress(), NO_GROUPS)


def headline(summary: dict[str, Any], checkpoints: Sequence[Path]) -> str:
    """What was learnt, where the run is and, when it broke off, which checkpoint it can go on from; for people."""
    lines = []
    for name, key in (("sampled (T as trained)", "accuracy"), ("greedy", "greedy")):
        before, after = summary[f"{key}_before"], summary[f"{key}_after"]
        if before is not None and after is not None:
            lines.append(f"held-out accuracy, {name}: {before:.3f} -> {after:.3f}")
    speed = summary["completion_tokens_per_s"]
    lines.append(
        f"{summary['num_steps']} steps in {summary['train_wall_s']:.1f} s of training, "
        f"{speed or 0:.0f} completion tokens/s, staleness at most {summary['max_staleness_seen']}"
    )
    lines.append(f"run: {summary['output_dir']} ({summary['stop_reason']})")
    if summary["stop_reason"] in ("interrupted", "error"):
        lines.append(f"resume=auto goes on from {checkpoints[-1].name}" if checkpoints else "no checkpoint was saved")
    return "\n".join(lines)
