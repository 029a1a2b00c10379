"""Runs one function on several gloo ranks of this machine, with a deadline that holds.

    def work(rank, world_size, scale):       # module level: it is sent to the ranks by name
        x = torch.full((1,), scale * rank)
        torch.distributed.all_reduce(x)
        return x.item()

    assert run_ranks(work, 4, 0.5, timeout_s=30) == [3.0] * 4

Ranks are forked from a clean server process that has imported the test modules of this session once and has started no thread,
so a rank starts in milliseconds. Results are pickled by value: tensors come back as ordinary CPU tensors.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LOG_TAIL_CHARS = 8000
GRACE_S = 3.0  # after the first rank failed: long enough for others to fail by themselves, so that each one's own error is seen
STACK_DUMP_S = 1.0  # how long a stopped rank has to write its stack


class RanksFailed(AssertionError):
    """At least one rank raised, died or was still running at the deadline. The message holds every rank's error or stack."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, process_group: bool = True) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` on `world_size` processes and returns the results in rank order.

    Args:
        fn: a module-level function. Result and arguments must pickle.
        timeout_s: wall-clock limit for the whole call, start of the processes included. Every rank is gone when this function returns.
        process_group: create the default gloo group before `fn` and destroy it after. False leaves that to `fn`, which finds torchrun's
            environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) set in both cases.

    Raises:
        RanksFailed: with exception, captured output and, for ranks that were stopped, the stack of every rank.
    """
    with start_ranks(fn, world_size, *args, timeout_s=timeout_s, process_group=process_group) as ranks:
        return ranks.results()


class Ranks:
    """Running ranks; made by `start_ranks`."""

    def __init__(self, fn: Callable[..., Any], processes: Sequence[Any], folder: Path, timeout_s: float) -> None:
        self._fn, self._processes, self._folder, self._timeout_s = fn, processes, folder, timeout_s
        self._deadline = time.monotonic() + timeout_s
        for process in processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Each is also the number of the process group that holds what the rank started."""
        return [process.pid for process in self._processes]

    def is_running(self) -> bool:
        """Whether no rank has ended."""
        return all(process.is_alive() for process in self._processes)

    def output(self, rank: int) -> str:
        """What the rank has printed."""
        return _file(self._folder, rank, "log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL to every rank and all it started."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def results(self) -> list[Any]:
        """Waits for all ranks. Raises RanksFailed as `run_ranks` does."""
        running = _wait(self._processes, self._deadline)
        _stop(self._processes)
        if any(process.exitcode != 0 for process in self._processes):
            raise RanksFailed(_report(self._fn, self._processes, running, self._folder, self._timeout_s))
        return [pickle.loads(_file(self._folder, rank, "result").read_bytes()) for rank in range(len(self._processes))]


@contextlib.contextmanager
def start_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, process_group: bool = True) -> Iterator[Ranks]:
    """Starts what `run_ranks` runs, for a caller that does something meanwhile. On leaving no rank is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_modules_to_preload(fn))  # takes effect when the server first starts
    # The store lives here and the ranks are its clients, as under torchrun: no port is ever picked and then raced for.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            context.Process(target=_rank_main, args=(fn, args, rank, world_size, store.port, folder, timeout_s, process_group)) for rank in range(world_size)
        ]
        try:
            yield Ranks(fn, processes, Path(folder), timeout_s)
        finally:
            _stop(processes)


def _modules_to_preload(fn: Callable[..., Any]) -> list[str]:
    tests = {name for name in sys.modules if name.startswith("tests.distributed.")}
    return ["torch", "torch.distributed", *sorted(tests | {fn.__module__})]


def _file(folder: str | Path, rank: int, kind: str) -> Path:
    return Path(folder) / f"rank{rank}.{kind}"


def _wait(processes: Sequence[Any], deadline: float) -> set[int]:
    """Waits for all ranks, or until the deadline, or until GRACE_S after the first failure. Returns the ranks still running."""
    running = dict(enumerate(processes))
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], timeout=left)
        ended = [rank for rank, process in running.items() if not process.is_alive()]
        if any(running.pop(rank).exitcode != 0 for rank in ended):
            deadline = min(deadline, time.monotonic() + GRACE_S)
    return set(running)


def _stop(processes: Sequence[Any]) -> None:
    """Asks ranks that still run for their stacks, then kills each with everything it started."""
    alive = [process for process in processes if process.pid is not None and process.is_alive()]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR2)
    if alive:
        wait([process.sentinel for process in alive], timeout=STACK_DUMP_S)
    for process in processes:
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # for a rank stopped before it had a group of its own
            process.join()


def _report(fn: Callable[..., Any], processes: Sequence[Any], running: set[int], folder: Path, timeout_s: float) -> str:
    lines = [f"{fn.__module__}.{fn.__name__} on {len(processes)} ranks:"]
    for rank, process in enumerate(processes):
        if rank in running:
            state = f"was still running and was stopped (limit {timeout_s:g} s, or {GRACE_S:g} s after another rank failed); its stack is below"
        elif process.exitcode == 0:
            state = "finished"
        else:
            state = f"failed with exit code {process.exitcode}"
        lines.append(f"--- rank {rank} {state}")
        for kind in ("error", "log"):
            path = _file(folder, rank, kind)
            if process.exitcode != 0 and path.exists():
                lines.append(path.read_text(errors="replace")[-LOG_TAIL_CHARS:].rstrip())
    return "\n".join(lines)


def _rank_main(
    fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, port: int, folder: str, timeout_s: float, process_group: bool
) -> None:
    os.setsid()  # a process group of its own, so that the launcher can also end what `fn` starts
    log = _file(folder, rank, "log").open("w")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=True)
    faulthandler.dump_traceback_later(timeout_s + 30, exit=True, file=log)  # holds even when the launching process was killed
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # every rank is a client of the launcher's store
        TORCHELASTIC_RESTART_COUNT="0",
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    try:
        if process_group:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
        result = fn(rank, world_size, *args)
        _file(folder, rank, "result").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        _file(folder, rank, "error").write_text(traceback.format_exc())
        os._exit(1)  # no atexit handler may wait for other ranks
