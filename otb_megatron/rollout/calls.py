"""Waiting for several engines at once, with a deadline and with their names in every error."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayTaskError

from otb_megatron.types import UserError

LOGS = "the engine's own output is among Ray's logs, by default in /tmp/ray/session_latest/logs"


class Deadline:
    """A point in time, and how it was chosen.

    Args:
        timeout_s: seconds from now.
        setting: key of the configuration that `timeout_s` comes from.
    """

    def __init__(self, timeout_s: float, setting: str):
        self.timeout_s = timeout_s
        self.setting = setting
        self._end = time.monotonic() + timeout_s

    @property
    def remaining(self) -> timedelta:
        """For torch, which takes 0 for no limit at all: never quite 0."""
        return timedelta(seconds=max(self.remaining_s, 0.001))

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end - time.monotonic())


def wait_for_all(calls: Mapping[str, ObjectRef], deadline: Deadline, doing: str) -> list[Any]:
    """The results of `calls`, in order.

    Args:
        calls: a call for each name, such as "engine 0 (prompts 3, 7)".
        doing: what the engines do, for the error: "generating".

    Raises:
        UserError: an engine raised one or died, or the deadline passed.
        RuntimeError: an engine raised something else. The first failure is raised at once.
    """
    pending = dict(calls)
    while pending:
        ray.wait(list(pending.values()), num_returns=1, timeout=deadline.remaining_s)
        finished = raise_failures(pending, doing)
        pending = {name: call for name, call in pending.items() if name not in finished}
        if pending and deadline.remaining_s == 0:
            raise UserError(f"still {doing} after {deadline.timeout_s:g} s, which is {deadline.setting}: {'; '.join(pending)}")
    return ray.get(list(calls.values()))


def raise_failures(calls: Mapping[str, ObjectRef], doing: str) -> set[str]:
    """The names of the calls that have ended, without waiting; raises the exception of the first that failed."""
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0)
    finished = {name for name, call in calls.items() if call in ready}
    for name in finished:
        try:
            ray.get(calls[name])
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(f"{name}: {error.cause}") from error
            raise RuntimeError(f"{name} failed while {doing}: {type(error.cause).__name__}: {error.cause} ({LOGS})") from error
        except RayActorError as error:
            cause = " ".join(str(error).split())
            raise UserError(f"{name} died while {doing}: {cause} ({LOGS}). The same command continues from the latest checkpoint") from error
    return finished
