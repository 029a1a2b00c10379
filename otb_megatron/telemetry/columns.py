"""A step's key metrics as one aligned line of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

TIME_PREFIX = "time/"
TOTAL_TIME = "time/step"
REWARD = "rewards/mean"
ACCURACY = "eval/accuracy"


@dataclass(frozen=True, slots=True)
class Column:
    """One number of the line. It is as wide as its label, and at least `width`."""

    key: str  # metric
    label: str
    short_label: str  # where the terminal is narrow
    width: int


METRIC_COLUMNS = (
    Column("loss/total", "loss", "loss", 6),
    Column("data/tokens", "tokens", "tok", 5),
    Column(REWARD, "reward", "rew", 6),
    Column(ACCURACY, "held-out", "eval", 5),
    Column("response/length", "length", "len", 5),
    Column("policy/entropy", "entropy", "entr", 6),
    Column("optimizer/grad_norm", "grad norm", "grad", 6),
    Column("policy/energy", "energy", "enrg", 6),
)
PHASE_COLUMNS = (
    Column("time/rollout", "rollout", "roll", 4),
    Column("time/reward", "reward", "rewd", 4),
    Column("time/pack", "pack", "pack", 4),
    Column("time/statistics", "stats", "stat", 4),
    Column("time/advantages", "adv", "adv", 4),
    Column("time/update", "update", "updt", 4),
    Column("time/weights", "weights", "wght", 4),
)
TOTAL_COLUMN = Column(TOTAL_TIME, "s/step", "s/st", 4)
# Beside a reward they say nothing at a glance: a policy loss is about 0 by construction and the length says the tokens.
SUPERVISED_ONLY = ("loss/total", "data/tokens")


@dataclass(frozen=True, slots=True)
class Cell:
    column: Column
    label: str
    gap: str  # before the number

    @property
    def width(self) -> int:
        return max(self.column.width, len(self.label))


class StepLine:
    """The layout of a run's lines, chosen once, from the metrics of its first training step and the width of the terminal.

    Labels and gaps shrink where the terminal is narrow, first those of the phases; then the phases that took least are left out.

    Args:
        num_steps: last step of the run.
        values: metrics of the first training step.
        seen: metrics of earlier lines, which get a column too.
        width: of the terminal, in characters; None for a log file, where nothing has to fit.
    """

    def __init__(self, num_steps: int, values: dict[str, float], seen: frozenset[str], width: int | None) -> None:
        self._num_steps = num_steps
        self._width = width
        hidden = SUPERVISED_ONLY if REWARD in values else ()
        metrics = [c for c in METRIC_COLUMNS if (c.key in values or c.key in seen) and c.key not in hidden]
        phases = [c for c in PHASE_COLUMNS if c.key in values]  # others (a checkpoint, an evaluation) are not in every step
        self._cells = self._choose(metrics, phases, values)
        self._shown = {cell.column.key for cell in self._cells} | set(SUPERVISED_ONLY)

    def header(self) -> str:
        return self._join("step", lambda cell: cell.label)

    def row(self, step: int, values: dict[str, float]) -> str:
        """The numbers under their labels. What has no column follows with its name where it fits; held-out accuracy always does, if need be below."""
        line = self._join(progress_label(step, self._num_steps), lambda cell: _text(cell.column, values[cell.column.key]) if cell.column.key in values else "")
        for column in (*METRIC_COLUMNS, *phase_columns(values)):
            if column.key not in values or column.key in self._shown:
                continue
            unit = " s" if column.key.startswith(TIME_PREFIX) else ""
            note = f"  {column.label} {_text(column, values[column.key])}{unit}"
            if self._width is None or len(line) + len(note) <= self._width:
                line += note
            elif column.key == ACCURACY:
                line += "\n" + " " * self._step_width + note
        return line.rstrip()

    def _choose(self, metrics: list[Column], phases: list[Column], values: dict[str, float]) -> list[Cell]:
        for short_metrics, short_phases in ((False, False), (False, True), (True, True)):
            cells = _cells(metrics, phases, values, short_metrics, short_phases)
            if self._fits(cells):
                return cells
        phases = list(phases)
        while phases and not self._fits(cells):
            phases.remove(min(phases, key=lambda column: values[column.key]))
            cells = _cells(metrics, phases, values, True, True)
        return cells

    def _fits(self, cells: list[Cell]) -> bool:
        return self._width is None or self._step_width + sum(len(cell.gap) + cell.width for cell in cells) <= self._width

    @property
    def _step_width(self) -> int:
        return len(progress_label(0, self._num_steps))

    def _join(self, first: str, text: Callable[[Cell], str]) -> str:
        return first.rjust(self._step_width) + "".join(cell.gap + text(cell).rjust(cell.width) for cell in self._cells)


def _cells(metrics: list[Column], phases: list[Column], values: dict[str, float], short_metrics: bool, short_phases: bool) -> list[Cell]:
    cells = [Cell(column, column.short_label if short_metrics else column.label, " " if short_metrics else "  ") for column in metrics]
    timed = phases + ([TOTAL_COLUMN] if TOTAL_TIME in values else [])
    for position, column in enumerate(timed):
        gap = " " if short_phases else "  "
        cells.append(Cell(column, column.short_label if short_phases else column.label, (" |" if position == 0 else "") + gap))
    return cells


def phase_columns(names: Iterable[str]) -> list[Column]:
    """The columns of all "time/..." metrics among `names`, the total left out: known phases in the order of a step, then others as they come."""
    known = {column.key: column for column in PHASE_COLUMNS}
    present = dict.fromkeys(name for name in names if name.startswith(TIME_PREFIX) and name != TOTAL_TIME)
    others = [key.removeprefix(TIME_PREFIX) for key in present if key not in known]
    return [known[key] for key in known if key in present] + [Column(TIME_PREFIX + name, name, name[:4], 4) for name in others]


def _text(column: Column, value: float) -> str:
    return (seconds if column.key.startswith(TIME_PREFIX) else number)(value, column.width)


def progress_label(step: int, num_steps: int) -> str:
    """ "7/120", as wide as the longest one of the run and as the word "step"."""
    return f"{step}/{num_steps}".rjust(max(len("step"), len(f"{num_steps}/{num_steps}")))


def number(value: float, width: int) -> str:
    """`value` in `width` characters (5 or more), with 3 decimals if they fit. Only exponents below -9 may need one or two characters more."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        for decimals in (3, 2, 1, 0):
            text = f"{value:.{decimals}f}"
            if len(text) <= width:
                return text
    if abs(value) >= 1e3:
        for divisor, suffix in ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T")):
            text = f"{value / divisor:.3g}{suffix}"
            if abs(value) < 999.5 * divisor and len(text) <= width:
                return text
    for decimals in (1, 0):
        mantissa, exponent = f"{value:.{decimals}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
        if len(text) <= width:
            return text
    return text


def seconds(value: float, width: int) -> str:
    """Seconds with 2, 1 or no decimals, whatever `width` (4 or more) takes; hours from 10000 s on."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value / 3600:.1f}h"
