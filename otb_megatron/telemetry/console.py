"""The terminal: a line of key metrics for each step, a progress bar below the lines, and a short table at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from otb_megatron.telemetry.columns import ACCURACY, METRIC_COLUMNS, StepLine, number, progress_label

_UNKNOWN = "-:--:--"


class StepConsole:
    """Prints one line for each step and keeps a progress bar under them.

    The columns are those of `columns.StepLine`; right of the bar character all numbers are seconds. Where the output is not a
    terminal (a log file) there is no progress bar and no control code, and elapsed and remaining time end each line.

    Nothing runs in the background, the bar is redrawn at each step: a refreshing thread could hold the terminal's lock at the
    moment when a reward worker is forked, and that worker could then never print.
    """

    def __init__(self, *, num_steps: int, first_step: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._num_steps = num_steps
        self._clock = clock
        self._started = clock()
        self._pace_from: tuple[int, float] | None = None  # step and time of the first line: starting up is no part of the pace
        self._seen: frozenset[str] = frozenset()
        self._line: StepLine | None = None
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20 if self._console.width < 100 else 40),
                TextColumn("{task.percentage:>3.0f}%  elapsed {task.fields[elapsed]}  remaining {task.fields[remaining]}"),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=max(first_step - 1, 0), elapsed=_duration(0), remaining=_UNKNOWN)
            self._bar.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        elapsed, remaining = self._times(step)
        lines = self._lines(step, values)
        if self._bar is None:
            lines[-1].append(f"  elapsed {elapsed}  remaining {remaining}")
            for line in lines:
                self._console.print(line, soft_wrap=True)
        else:
            for line in lines:  # cut where the terminal was made narrower since, so that they stay aligned
                self._console.print(line, no_wrap=True, overflow="crop")
            self._bar.update(self._task, completed=step, elapsed=elapsed, remaining=remaining, refresh=True)

    def close(self, failed: bool) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _lines(self, step: int, values: dict[str, float]) -> list[Text]:
        self._seen |= values.keys()
        is_training_step = any(column.key in values for column in METRIC_COLUMNS if column.key != ACCURACY)
        if self._line is None and not is_training_step:
            measured = f"  held-out accuracy {number(values[ACCURACY], 5)}" if ACCURACY in values else ""
            return [Text(progress_label(step, self._num_steps) + measured)]
        header = []
        if self._line is None:
            self._line = StepLine(self._num_steps, values, self._seen, self._console.width if self._bar is not None else None)
            header = [Text(self._line.header(), style="bold")]
        return header + [Text(line) for line in self._line.row(step, values).split("\n")]

    def _times(self, step: int) -> tuple[str, str]:
        """Elapsed and remaining time; what remains is known from the second line on."""
        now = self._clock()
        if self._pace_from is None:
            self._pace_from = (step, now)
        first_step, first_time = self._pace_from
        remaining = _UNKNOWN if step == first_step else _duration((now - first_time) / (step - first_step) * (self._num_steps - step))
        return _duration(now - self._started), remaining


class Countdown:
    """A line of progress now and then for work of known size, with the time that remains."""

    def __init__(self, unit: str, total: int, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._unit, self._total, self._interval_s, self._clock = unit, total, interval_s, clock
        self._started = clock()
        self._first: tuple[int, float] | None = None  # what was done, and when, at the first call: warming up is no part of the pace
        self._printed = self._started - interval_s

    def update(self, done: int) -> None:
        now = self._clock()
        if self._first is None:
            self._first = (done, now)
            return
        if done < self._total and now - self._printed < self._interval_s:
            return
        self._printed = now
        first_done, first_time = self._first
        remaining = _duration((now - first_time) / (done - first_done) * (self._total - done)) if done > first_done else _UNKNOWN
        print(f"{done}/{self._total} {self._unit}  elapsed {_duration(now - self._started)}  remaining {remaining}", flush=True)


def count_down_bytes(total_bytes: int, *, show: bool) -> Callable[[int], None]:
    """Takes the bytes done and shows them in MiB as a `Countdown`, or does nothing."""
    countdown = Countdown("MiB", total_bytes >> 20) if show else None
    return lambda num_bytes: countdown.update(num_bytes >> 20) if countdown else None


def summary_table(rows: Sequence[tuple[str, float | str | Path]], console: Console | None = None) -> None:
    """Prints name and value under each other at the end of a run. Paths stay on one line, whatever the width, so that they can be copied."""
    console = console or Console(highlight=False)
    width = max((len(name) for name, _ in rows), default=0)
    console.print()
    for name, value in rows:
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", text), soft_wrap=True)


def _duration(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
