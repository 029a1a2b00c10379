"""The reward processes: one server that imports the function, and the workers that it forks.

The server starts clean (it is executed, not forked, so no torch, gloo or Ray state of the trainer is in it), imports the
function once, and never calls it. Forking it costs milliseconds and shares its memory: a killed worker is replaced at
once, however long the verifier's library takes to import. It alone reaps and kills workers. When the trainer is gone, by
whatever death, it kills them all, and when it is gone itself, the kernel does.

Messages over the control connection:
    trainer -> server   (function name, options), first of all
                        ("start", worker), followed by the file descriptor of the worker's end of its connection
                        ("kill", worker)
                        ("close", None)
    server -> trainer   ("failed", message) when the function cannot be imported
                        ("exited", worker, exit status), negative for a signal

Over a worker's own connection:
    trainer -> worker   [(index, prompt, response), ...], once the previous list is finished
    worker -> trainer   "ready", once
                        (index, score), or (index, kind of failure, message), in the order of the list
"""

from __future__ import annotations

import ctypes
import math
import numbers
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from otb_megatron.rewards.registry import RewardFunction, resolve
from otb_megatron.types import Prompt, Response, UserError

PR_SET_PDEATHSIG = 1  # linux/prctl.h; Python has no name for it
MAX_MESSAGE = 500  # characters of a verifier's error that travel to the trainer


def serve(control_fd: int, trainer_pid: int) -> None:
    """The server's main program: starts and kills workers as told, reports each one's end, and leaves none behind."""
    control = Connection(control_fd)
    # A process forked by the trainer may outlive it with the control connection open, so the end of the connection says too little.
    trainer = os.pidfd_open(trainer_pid)
    if os.getppid() != trainer_pid:
        return  # the trainer is gone, and the number may be another process's by now
    name, options = control.recv()
    try:
        function = resolve(name, options)
    except UserError as error:
        control.send(("failed", str(error)))
        return
    workers: dict[int, tuple[int, int]] = {}  # worker -> (process id, pidfd)
    try:
        while True:
            ready = wait([control, trainer, *(pidfd for _, pidfd in workers.values())])
            if trainer in ready:
                return
            for worker, (pid, pidfd) in list(workers.items()):
                if pidfd in ready:
                    _signal_group(pid)  # what the verifier left running
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    os.close(pidfd)
                    del workers[worker]
                    control.send(("exited", worker, status))
            if control in ready:
                order, worker = control.recv()
                if order == "close":
                    return
                if order == "start":
                    workers[worker] = _start(control, function, options)
                elif worker in workers:
                    _signal_group(workers[worker][0])
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the trainer is gone
    finally:
        for pid, _ in workers.values():
            _signal_group(pid)


def _start(control: Connection, function: RewardFunction, options: Mapping[str, Any]) -> tuple[int, int]:
    """Forks a worker; returns its process id and a pidfd of it."""
    connection = Connection(reduction.recv_handle(control))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            control.close()
            _work(connection, function, options)
            status = 0
        finally:
            os._exit(status)  # a worker must never return into the server's loop
    os.setpgid(pid, pid)  # here too: whichever comes first, a kill finds the group
    connection.close()
    return pid, os.pidfd_open(pid)


def _signal_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself


def _work(connection: Connection, function: RewardFunction, options: Mapping[str, Any]) -> None:
    own_pid = os.getpid()
    connection.send("ready")
    while True:
        try:
            calls = connection.recv()
        except EOFError:
            return
        for index, prompt, response in calls:
            outcome = _call(function, prompt, response, options)
            if os.getpid() != own_pid:
                os._exit(0)  # a process that the verifier forked has come back from it
            connection.send((index, *outcome))


def _call(function: RewardFunction, prompt: Prompt, response: Response, options: Mapping[str, Any]) -> tuple[float] | tuple[str, str]:
    try:
        score = function(prompt, response, **options)
        number = float(score) if isinstance(score, numbers.Real | np.bool_) else math.nan
    except BaseException as error:  # SystemExit too: whatever a verifier raises is its failure, not ours
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return "raised", f"{type(error).__name__}: {error}"[:MAX_MESSAGE] + f" ({frame.filename}:{frame.lineno})"
    if not math.isfinite(number):
        return "not a number", f"it returned {score!r}"[:MAX_MESSAGE]
    return (number,)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # nothing is left to flush, and torch takes its time to unload
