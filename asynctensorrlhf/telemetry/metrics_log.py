"""`metrics.jsonl`: one row per trainer step, whatever else is configured.

Knows the layout of a row; does not know which metrics there are.
"""

from __future__ import annotations

from pathlib import Path

from asynctensorrlhf.telemetry.json_lines import JsonLines
from asynctensorrlhf.types import StepReport


class MetricsLog:
    """Rows `{"step": ..., "policy_version": ..., "area/name_unit": ...}`; null where it is not finite."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def append(self, report: StepReport) -> None:
        """Write the step's row.

        Raises:
            OSError: the disk refused; the file is as it was before.
        """
        self._lines.append([{"step": report.step, "policy_version": report.policy_version, **report.metrics}])

    def close(self) -> None:
        """No more rows."""
        self._lines.close()
