"""metrics.jsonl: the one record of a run that is always written, one line a step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from otb_megatron.types import UserError

METRICS_FILE = "metrics.jsonl"


class JsonLines:
    """Appends `{"step": 7, "rewards/mean": 0.5, ...}`, flushed after every line.

    Lines of an earlier process with a step from `first_step` on are cut off when the file is opened, and so is a last
    line that was being written when that process died. JSON has no NaN and no infinity: both become null.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = path
        if path.exists():
            _truncate(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, failed: bool) -> None:
        self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in the order of their steps; a last line without its end is still being written and left out.

    Raises:
        UserError: a line that is not an object with a whole-numbered "step", or a step that does not follow the one before it.
    """
    return [row for row, _ in _rows(path)]


def _truncate(path: Path, first_step: int) -> None:
    keep_bytes = max((end for row, end in _rows(path) if row["step"] < first_step), default=0)
    with path.open("r+b") as file:
        file.truncate(keep_bytes)


def _rows(path: Path) -> list[tuple[dict[str, Any], int]]:
    """Each row with the byte offset of its end."""
    rows: list[tuple[dict[str, Any], int]] = []
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            row = json.loads(line)
            step = row["step"]
            in_order = isinstance(step, int) and (not rows or step > rows[-1][0]["step"])
        except (ValueError, TypeError, KeyError):
            in_order = False
        if not in_order:
            raise UserError(f"{path}, line {number}: not a row of metrics with a step above the one before it; repair the line or move the file away")
        rows.append((row, end))
    return rows
