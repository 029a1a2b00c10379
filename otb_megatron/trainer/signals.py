"""The signals that a cluster sends before it takes the machine away: a request to save and end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# One request may arrive twice: SLURM can signal the launcher and the ranks alike, and the launcher passes its own on.
_ONE_REQUEST_S = 2.0


class StopSignals:
    """Takes SIGTERM and SIGUSR1 from construction to `close`; in between they no longer end the process.

    The first one is kept in `received` for whoever asks. One that comes more than two seconds later ends the process at once.
    Signals are read by a thread, because the main thread may be inside a collective, where Python runs no handler.
    For the main thread only. Whatever sets handlers of its own, as Ray does when it starts, must have done so before.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Python writes the number of a signal to this descriptor even while the main thread is busy, if the signal has a handler.
        self._previous = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        self._previous_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Gives the signals back their earlier meaning."""
        signal.set_wakeup_fd(self._previous_descriptor)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        first_s = 0.0
        while number := os.read(self._read, 1):
            if number[0] not in STOP_SIGNALS:
                continue
            if self.received is None:
                self.received, first_s = signal.Signals(number[0]).name, time.monotonic()
            elif time.monotonic() - first_s > _ONE_REQUEST_S:
                print(f"a second signal, {signal.Signals(number[0]).name}: ending without a checkpoint", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
