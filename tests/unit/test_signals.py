"""A signal is a request, twice the same request within two seconds is one, and a later one ends the process whatever it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from otb_megatron.trainer.signals import STOP_SIGNALS, StopSignals

# The main thread locks a mutex twice: it is then where Python runs no handler, as inside a collective.
BUSY = """
import ctypes, threading, time
from otb_megatron.trainer.signals import StopSignals

signals = StopSignals()

def tell():
    print("ready", flush=True)
    while signals.received is None:
        time.sleep(0.01)
    print(signals.received, flush=True)

threading.Thread(target=tell, daemon=True).start()
mutex = ctypes.create_string_buffer(64)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def test_a_busy_process_takes_a_request_and_ends_at_the_next() -> None:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGTERM)  # the same request, by another way
        time.sleep(2.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert process.stderr is not None and process.stderr.read() == "a second signal, SIGTERM: ending without a checkpoint\n"
    finally:
        process.kill()
        process.communicate()


def test_closing_gives_the_handlers_back() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    signals = StopSignals()
    os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + 10
    while signals.received is None and time.monotonic() < deadline:
        time.sleep(0.01)
    signals.close()
    assert signals.received == "SIGUSR1"
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
