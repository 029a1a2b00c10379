"""Rewards computed in worker processes, each call with a deadline."""

from __future__ import annotations

import math
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection, wait
from typing import Literal

from otb_megatron.config import RewardConfig
from otb_megatron.rewards.registry import resolve
from otb_megatron.types import Prompt, Response, UserError

START_TIMEOUT_S = 300.0  # for importing a verifier's module over a slow shared file system
SEND_TIMEOUT_S = 10
CLOSE_TIMEOUT_S = 5.0
MAX_CHUNK = 8  # calls that travel together: enough to hide the round trip, few enough that no worker idles while another has a queue
MAX_SHOWN_FAILURES = 5
EXCERPT_CHARS = 200

FailureKind = Literal["raised", "timeout", "not a number", "crashed"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A call that gave no reward."""

    index: int  # of the pair in the batch
    prompt_id: int
    kind: FailureKind
    message: str


@dataclass(frozen=True)
class RewardBatch:
    rewards: list[float]  # [pairs], in their order; `failure_reward` where the call failed
    failures: list[RewardFailure]  # by index


Outcome = tuple[float] | tuple[FailureKind, str]


class _Worker:
    """The trainer's view of one worker process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ready = False  # it has said so
        self.hung_up = False  # its end of the connection is closed; how it ended is still to come
        self.calls: deque[int] = deque()  # indices handed to it and not answered, in its order: the first one is running
        self.since = time.monotonic()  # start of the running call; of the process, until it is ready

    def answers(self) -> list[tuple[int, Outcome]]:
        """All that it has sent since the last time."""
        answered: list[tuple[int, Outcome]] = []
        while not self.hung_up and self.connection.poll():
            try:
                message = self.connection.recv()
            except (EOFError, ConnectionResetError):
                self.hung_up = True
                break
            self.since = time.monotonic()
            if message == "ready":
                self.ready = True
            else:
                self.calls.popleft()
                answered.append((message[0], message[1:]))
        return answered


class RewardPool:
    """Runs one reward function over batches of (prompt, response).

    Workers start in the background when the pool is made. A worker whose call passes its deadline is killed, with every process
    that it started, and replaced. Each call is made once. Threads must not share a pool.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Raises UserError if the function cannot be imported or does not take its options."""
        resolve(config.function, config.options)
        self._config = config
        self._workers: dict[int, _Worker] = {}
        self._num_started = 0
        self._control, far_end = Pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "otb_megatron.rewards.worker", str(far_end.fileno()), str(os.getpid())],
            pass_fds=[far_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        far_end.close()
        self._control.send((config.function, config.options))
        for _ in range(config.num_workers):
            self._start_worker()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score(self, pairs: Sequence[tuple[Prompt, Response]]) -> RewardBatch:
        """Scores every pair, in bounded time whatever the function does. It sees the responses without their log-probs.

        Raises:
            UserError: more than `max_failures` calls raised, passed `timeout_s`, returned no finite number or ended their
                process. The pool can be used again.
        """
        rewards = [self._config.failure_reward] * len(pairs)
        failures: list[RewardFailure] = []
        pending = deque(range(len(pairs)))
        num_open = len(pairs)
        while num_open:
            self._hand_out(pending, pairs)
            for index, outcome in self._wait(pending):
                num_open -= 1
                if len(outcome) == 1:
                    rewards[index] = outcome[0]
                else:
                    failures.append(RewardFailure(index, pairs[index][0].id, *outcome))
            if len(failures) > self._config.max_failures:
                for worker in [key for key, worker in self._workers.items() if worker.calls]:
                    self._replace(worker)
                raise UserError(self._explain(failures, pairs))
        return RewardBatch(rewards, sorted(failures, key=lambda failure: failure.index))

    def close(self) -> None:
        """Ends all processes within seconds, hung ones too."""
        try:
            self._control.send(("close", None))  # at which the server kills its workers and ends
        except BrokenPipeError:
            pass  # it has ended
        self._control.close()
        for worker in self._workers.values():
            worker.connection.close()
        self._workers.clear()
        try:
            self._server.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _hand_out(self, pending: deque[int], pairs: Sequence[tuple[Prompt, Response]]) -> None:
        """Gives every idle worker some of the pending calls, fewer and fewer towards the end."""
        for key, worker in list(self._workers.items()):
            if not pending:
                return
            if not worker.ready or worker.calls or worker.hung_up:
                continue
            size = min(MAX_CHUNK, -(-len(pending) // (2 * self._config.num_workers)))
            worker.calls.extend(pending.popleft() for _ in range(size))
            worker.since = time.monotonic()
            try:
                # Log-probs would be most of the bytes, and a verifier has no use for them.
                worker.connection.send([(index, pairs[index][0], replace(pairs[index][1], log_probs=())) for index in worker.calls])
            except (BrokenPipeError, BlockingIOError):  # it has ended, or takes nothing: none of the calls was made
                pending.extendleft(reversed(worker.calls))
                self._replace(key)

    def _wait(self, pending: deque[int]) -> list[tuple[int, Outcome]]:
        """Waits for an answer, an exit or a deadline, and returns the calls that are done with. Some call must be open."""
        until = min(self._deadline(worker) for worker in self._workers.values())
        connections = [worker.connection for worker in self._workers.values() if not worker.hung_up]
        ready = wait([self._control, *connections], max(0.0, until - time.monotonic()))
        done: list[tuple[int, Outcome]] = []
        for worker in self._workers.values():
            done += worker.answers()
        if self._control in ready:
            done += self._exits(pending)
        for key, worker in list(self._workers.items()):
            if time.monotonic() < self._deadline(worker):
                continue
            if not worker.ready:
                raise UserError(
                    f"no reward worker was ready within {START_TIMEOUT_S:.0f} s; importing rewards.function={self._config.function!r} seems to hang"
                )
            done += self._lose(key, pending, "timeout", f"no result within rewards.timeout_s={self._config.timeout_s:g} s")
        return done

    def _exits(self, pending: deque[int]) -> list[tuple[int, Outcome]]:
        """Reads one message of the server and replaces the worker that it says has ended."""
        try:
            message = self._control.recv()
        except (EOFError, ConnectionResetError) as error:
            raise self._server_ended() from error
        if message[0] == "failed":
            raise UserError(message[1])
        _, key, status = message
        if key not in self._workers:
            return []  # replaced already
        how = f"exit code {status}" if status >= 0 else signal.Signals(-status).name
        done = self._workers[key].answers()  # what it sent before it ended
        return done + self._lose(key, pending, "crashed", f"its process ended ({how}) before it returned")

    def _lose(self, key: int, pending: deque[int], kind: FailureKind, message: str) -> list[tuple[int, Outcome]]:
        """Replaces a worker. Its running call, if any, has failed; the calls behind that one were not made and go back to `pending`."""
        calls = self._workers[key].calls
        failed: list[tuple[int, Outcome]] = [(calls.popleft(), (kind, message))] if calls else []
        pending.extendleft(reversed(calls))
        self._replace(key)
        return failed

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_TIMEOUT_S
        return worker.since + self._config.timeout_s if worker.calls or worker.hung_up else math.inf

    def _replace(self, key: int) -> None:
        """Kills a worker, if it lives, and starts another; its calls are the caller's to look after."""
        self._workers.pop(key).connection.close()
        try:
            self._control.send(("kill", key))
            self._start_worker()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._server_ended() from error

    def _start_worker(self) -> None:
        near_end, far_end = Pipe()
        with socket.socket(fileno=os.dup(near_end.fileno())) as end:  # a send to a stuck worker must fail rather than block
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT_S, 0))
        self._control.send(("start", self._num_started))
        reduction.send_handle(self._control, far_end.fileno(), self._server.pid)
        far_end.close()
        self._workers[self._num_started] = _Worker(near_end)
        self._num_started += 1

    def _server_ended(self) -> UserError:
        return UserError(f"the reward server process has ended (exit code {self._server.wait(CLOSE_TIMEOUT_S)}); what it printed stands above")

    def _explain(self, failures: Sequence[RewardFailure], pairs: Sequence[tuple[Prompt, Response]]) -> str:
        function, max_failures = self._config.function, self._config.max_failures
        lines = [f"{len(failures)} of {len(pairs)} calls of rewards.function={function!r} failed, more than rewards.max_failures={max_failures}:"]
        for failure in sorted(failures, key=lambda failure: failure.index)[:MAX_SHOWN_FAILURES]:
            text = pairs[failure.index][1].text
            excerpt = repr(text if len(text) <= EXCERPT_CHARS else text[:EXCERPT_CHARS] + "...")
            lines.append(f"  prompt {failure.prompt_id}, response {excerpt}: {failure.kind}: {failure.message}")
        lines.append("Mend the function, give it more time (rewards.timeout_s) or tolerate failures (rewards.max_failures, rewards.failure_reward)")
        return "\n".join(lines)
