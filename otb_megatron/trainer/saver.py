"""When a run saves, and when it ends before its last step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.learner import Learner
from otb_megatron.trainer.signals import StopSignals


@dataclass(frozen=True)
class Stopped:
    """A run that ended before its last step because a signal asked for it."""

    signal: str
    step: int
    directory: Path


@dataclass(frozen=True)
class _Report:
    """What a rank knows at the end of a step and the others do not."""

    signal: str | None
    is_written: bool  # the checkpoint in the background
    due: bool  # by the driver's clock
    is_best: bool  # the driver measured a held-out accuracy above all before


class Saver:
    """Decides at the end of every step; all ranks decide the same, because all decide from the same reports.

    Building it is collective over the world. From then on SIGTERM and SIGUSR1 ask the run to stop.

    Args:
        resumed_from: the checkpoint that the run continues; None for a run that starts.
    """

    def __init__(self, config: Config, learner: Learner, driver: Driver, resumed_from: Path | None) -> None:
        self._settings, self._num_steps = config.checkpoint, config.trainer.num_steps
        self._learner, self._driver = learner, driver
        self._pending: tuple[checkpoint.Writing, dict[str, Any], bool] | None = None  # with the driver's state and whether it is the best
        self._saved_at_s = time.monotonic()
        self._best_accuracy = driver.run("looking for the best checkpoint", lambda: _best_accuracy(learner.checkpoints, resumed_from))
        self._signals = StopSignals()

    def after_step(self, step: int, state: dict[str, Any], accuracy: float | None) -> Stopped | None:
        """Saves if it is due, completes what was written meanwhile, and says whether to end now. Collective over the world.

        Args:
            state: of the driver; ignored elsewhere.
            accuracy: held-out, as the driver measured it after this step; None elsewhere and where it was not measured.
        """
        settings = self._settings
        due = bool(settings.interval_s) and time.monotonic() - self._saved_at_s >= settings.interval_s
        is_best = settings.keep_best and accuracy is not None and (self._best_accuracy is None or accuracy > self._best_accuracy)
        mine = _Report(self._signals.received, self._pending is None or self._pending[0].is_written, due, is_best)
        reports: list[_Report] = self._driver.exchange(f"the end of step {step}", mine)
        signal = next((report.signal for report in reports if report.signal), None)
        of_driver = reports[0]
        if all(report.is_written for report in reports):
            self._complete()
        at_interval = bool(settings.interval) and step % settings.interval == 0
        is_last = step == self._num_steps
        if is_last or signal or at_interval or of_driver.due or of_driver.is_best:
            self._complete()
            if is_best:
                self._best_accuracy = accuracy
            self._saved_at_s = time.monotonic()
            state = state | {"step": step, "accuracy": accuracy}
            self._pending = self._learner.start_save(step), state, of_driver.is_best
            if not settings.async_save or is_last or signal:
                self._complete()
        if signal is None or is_last:
            return None
        return Stopped(signal, step, checkpoint.directory_of(self._learner.checkpoints, step))

    def close(self) -> None:
        """Leaves a checkpoint in the background to end with the process. Not collective."""
        self._signals.close()

    def _complete(self) -> None:
        if self._pending is not None:
            writing, state, is_best = self._pending
            self._pending = None
            self._learner.complete_save(writing, state, is_best=is_best)


def _best_accuracy(root: Path, resumed_from: Path | None) -> float | None:
    """The accuracy of the best checkpoint up to the one that is continued; None where there is none."""
    kept = checkpoint.best(root) if resumed_from is not None else None
    return checkpoint.read_state(kept)["accuracy"] if kept is not None and resumed_from is not None and kept.name <= resumed_from.name else None
