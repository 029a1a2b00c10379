"""Wall time by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Accumulates wall seconds by phase name, on the host's clock.

    A repeated phase adds up. Of nested phases only the innermost runs at any moment: the time of an inner phase is its
    own and not also the outer one's, so the phases add up to the time that was spent in any of them. A phase that raises
    is counted up to there. One thread only.

    On a GPU a phase that does not wait for the device is charged for launching its work; the phase that waits pays.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0  # when the innermost open phase was last (re)started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order of first use; open phases up to now."""
        self._charge()
        return dict(self._seconds)

    def reset(self) -> None:
        """Forgets all seconds. Phases that are open run on from zero."""
        self._charge()
        self._seconds = dict.fromkeys(self._open, 0.0)

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now
