"""Verifiers that misbehave as the response's text tells them, for test_rewards.py. Imported by the reward processes."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from otb_megatron.types import Prompt, Response


def behave(prompt: Prompt, response: Response, *, log: str | None = None) -> Any:
    """Scores the prompt's id as 1000 + id, unless the text is the name of a misbehaviour."""
    if log is not None:
        with Path(log).open("a") as file:
            file.write(f"{prompt.id} {os.getpid()}\n")
    behaviour, _, argument = response.text.partition(" ")
    return BEHAVIOURS[behaviour](argument) if behaviour else 1000.0 + prompt.id


def _fork_and_return_twice(_: str) -> float:
    os.fork()
    return 5.0


def _hang_with_a_child(path: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
    time.sleep(1000)


def _raise(_: str) -> None:
    raise KeyError("no such unit")


class _ReprFails:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


BEHAVIOURS = {
    "spin": lambda _: re.match(r"(a+)+$", "a" * 60 + "b"),  # exponential, inside one C call that holds the interpreter
    "sleep": lambda _: time.sleep(1000),
    "hang": _hang_with_a_child,
    "fork": _fork_and_return_twice,
    "raise": _raise,
    "leave": lambda _: sys.exit(3),
    "die": lambda _: os._exit(0),
    "segfault": lambda _: ctypes.string_at(0),
    "close": lambda _: os.closerange(3, 100),
    "none": lambda _: None,
    "nan": lambda _: float("nan"),
    "text": lambda _: "1.0",
    "object": lambda _: _ReprFails(),
    "huge": lambda _: 10**400,
    "true": lambda _: True,
    "float32": lambda _: np.float32(0.5),
    "bool_": lambda _: np.bool_(True),
    "ask": lambda _: input(),
}
