"""Runs that are killed and resumed, each a whole `otb-megatron train` on two gloo ranks.

The ranks are forked from a server that has imported the program, which makes a start cheap; all else is a start from nothing, and the
kill is SIGKILL to both process groups at once. vLLM is replaced by `RecordedEngines`: it answers with recorded samples, and takes
the weights that every update streams to it. Everything else is the program itself; tests/faults/test_engine_kills.py has the engines too.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import xxhash

import otb_megatron.trainer.run
from otb_megatron.config import Config
from otb_megatron.config import validate as validate_config
from otb_megatron.mcore import checkpoint, checksums
from otb_megatron.rollout.recording import load_rollouts
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.main import run
from otb_megatron.types import Response, Sample
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import Ranks, start_ranks
from tests.models import VOCAB_SIZE, make_model

NUM_PROMPTS, PROMPTS_PER_STEP, RESPONSES = 7, 3, 2  # an epoch ends inside every second or third step
PLACES = ("rollout", "statistics", "update", "weights", "checkpoint", "anywhere")
_LONGEST_PLACE = 16  # bytes of the marker
IN_BACKGROUND = " while writing in the background"


@dataclass
class Outcome:
    """What a run left behind, and where its kills hit."""

    output_dir: Path
    kills: Counter[str] = field(default_factory=Counter)  # place -> kills that hit there

    @property
    def metrics(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (self.output_dir / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]

    @property
    def prompt_ids(self) -> list[list[int]]:
        """[step] -> the prompts whose samples the step trained on."""
        directory = self.output_dir / "rollouts"
        steps = range(1, len(list(directory.glob("step-*.jsonl"))) + 1)
        return [[sample.prompt.id for sample in load_rollouts(directory, step)[::RESPONSES]] for step in steps]

    @property
    def sent(self) -> dict[int, set[str]]:
        """Version -> digests of the weights that an engine received as that version."""
        found: dict[int, set[str]] = {}
        for line in (self.output_dir / "sent.jsonl").read_text().splitlines():
            version, digest = json.loads(line)
            found.setdefault(version, set()).add(digest)
        return found

    @property
    def best(self) -> tuple[str, float]:
        directory = checkpoint.best(self.output_dir / "checkpoints")
        assert directory is not None
        return directory.name, checkpoint.read_state(directory)["accuracy"]

    @property
    def weights(self) -> Checkpoint:
        return Checkpoint(self.output_dir / "export")


class RecordedEngines:
    """Answers with the samples of an earlier run, or with made-up ones where there is none, and digests the weights it is sent."""

    recording: Path | None = None

    def __init__(self, config: Config, *, load_weights: bool, first_step: int = 1) -> None:
        self._output_dir, self._version = config.trainer.output_dir, -1

    def sample(self, prompts: list[Any], n: int, temperature: float, metrics: Any, timer: PhaseTimer) -> list[Sample]:
        with timer.phase("rollout"):
            time.sleep(0.04)  # generating takes time, in which a kill can come
            if temperature == 0 or self.recording is None:
                return [sample for group, prompt in enumerate(prompts) for sample in self._made_up(prompt, n, group)]
            samples = load_rollouts(self.recording, self._version + 1)
        wanted, recorded = [prompt.id for prompt in prompts for _ in range(n)], [sample.prompt.id for sample in samples]
        assert wanted == recorded, f"step {self._version + 1} asked for prompts {wanted}, and {recorded} were recorded"
        return samples

    def _made_up(self, prompt: Any, n: int, group: int) -> Iterator[Sample]:
        for number in range(n):
            draw = random.Random(f"{self._version} {prompt.id} {number}")
            tokens = tuple(draw.randrange(2, VOCAB_SIZE) for _ in range(draw.randint(1, 6)))
            response = Response(tokens, tuple(-draw.random() for _ in tokens), "", "stop", self._version)
            yield Sample(prompt, response, group, float(draw.random() < 0.5))

    def send_weights(self, metadata: Any, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        digest = xxhash.xxh3_128()
        for name, tensor in tensors:
            time.sleep(0.001)  # so does a transfer
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        self._version = version
        with (self._output_dir / "sent.jsonl").open("a") as file:
            file.write(json.dumps([version, digest.hexdigest()]) + "\n")

    def close(self) -> None: ...


def make_run(work: Path, num_steps: int) -> dict[str, Any]:
    """Writes a model and prompts to `work`. Returns the settings of a run that saves, evaluates and crosses epochs often.

    Kernels are compiled before: numba's code may round otherwise in the process that compiles it than in those that find it in the cache.
    """
    subprocess.run([sys.executable, "-m", "tools.compile_kernels"], check=True, timeout=600)
    make_model(work / "model", "qwen3_tied")
    rows = [{"data_source": "t", "prompt": [{"role": "user", "content": f"{i}+{i}"}], "reward_model": {"ground_truth": "x"}} for i in range(NUM_PROMPTS)]
    (work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(work / "prompts.jsonl")}
    return {
        "model": {"path": str(work / "model"), "dtype": "float32", "make_vocab_size_divisible_by": 8},
        "data": {"train": source, "validation": source, "prompts_per_step": PROMPTS_PER_STEP},
        "parallel": {"tensor_model_parallel_size": 2},
        "optimizer": {"lr": 1e-2, "lr_decay_style": "cosine", "lr_warmup_steps": 2},
        "rollout": {"n": RESPONSES, "temperature": 0.9, "max_response_tokens": 8, "save": True},
        "algorithm": {"optimizer_steps_per_rollout": 2},
        "trainer": {"num_steps": num_steps, "eval_interval": 5},
        "checkpoint": {"interval": 2, "keep_best": True},
        "telemetry": {"progress": False, "tensorboard": False},
    }


def complete(values: dict[str, Any], output_dir: Path, recording: Path | None, *, real_engines: bool = False, timeout_s: float) -> Outcome:
    """Runs (or resumes) to the last step."""
    with started(values, output_dir, recording, real_engines=real_engines, timeout_s=timeout_s) as (ranks, _):
        ranks.results()
    return Outcome(output_dir)


def complete_with_kills(values: dict[str, Any], output_dir: Path, recording: Path, *, num_kills: int, seed: int, timeout_s: float) -> Outcome:
    """Runs until it is killed, checks what is on the disk, resumes, and so on; after `num_kills` kills to the last step.

    Every second process saves in the background. The places of `PLACES` take turns; a kill comes up to 30 ms after the process has
    reached its place for the first or second time.
    """
    draw, kills = random.Random(seed), Counter[str]()
    last_saved = 0
    for number in range(num_kills):
        in_background = (number + number // len(PLACES)) % 2 == 1  # each place gets both
        with started(values, output_dir, recording, async_save=in_background, timeout_s=timeout_s) as (ranks, marker):
            place = PLACES[number % len(PLACES)]
            wait_for(ranks, marker, place, times=draw.randint(1, 2))
            time.sleep(draw.random() * 0.03)
            assert ranks.is_running(), f"the run ended before kill {number + 1}"
            ranks.kill()
            kills[place_of(marker)] += 1
        _assert_gone(ranks.pids)
        saved = check_disk(output_dir / "checkpoints")
        assert saved >= last_saved, "a checkpoint was lost"
        last_saved = saved
    return Outcome(complete(values, output_dir, recording, timeout_s=timeout_s).output_dir, kills)


def stop_by_signal(values: dict[str, Any], output_dir: Path, recording: Path, number: signal.Signals, rank: int, *, async_save: bool, timeout_s: float) -> str:
    """Sends a signal to one rank in its second update, waits until all ranks have ended well, and returns what the driver printed."""
    with started(values, output_dir, recording, async_save=async_save, timeout_s=timeout_s) as (ranks, marker):
        wait_for(ranks, marker, "update", times=2)
        os.kill(ranks.pids[rank], number)
        ranks.results()
        return ranks.output(0)


def assert_same(killed: Outcome, whole: Outcome) -> None:
    """Metrics to the last digit, weights bit for bit, the same prompts in every step and each one exactly once an epoch."""
    assert killed.metrics == whole.metrics
    assert_same_weights(killed, whole)
    assert all(len(digests) == 1 for digests in killed.sent.values()), "a version was sent with different weights after a resume"
    assert killed.sent == whole.sent
    assert killed.best == whole.best
    assert killed.prompt_ids == whole.prompt_ids
    assert_visits_each_prompt_once(killed)


def assert_same_weights(killed: Outcome, whole: Outcome) -> None:
    """Bit for bit, in the exports."""
    assert whole.weights.names == killed.weights.names
    for name in whole.weights.names:
        assert torch.equal(whole.weights.get(name), killed.weights.get(name)), name


def assert_visits_each_prompt_once(outcome: Outcome) -> None:
    """In every whole epoch."""
    visited = [prompt for step in outcome.prompt_ids for prompt in step]
    for start in range(0, len(visited) - NUM_PROMPTS + 1, NUM_PROMPTS):
        assert sorted(visited[start : start + NUM_PROMPTS]) == list(range(NUM_PROMPTS))


@contextlib.contextmanager
def started(
    values: dict[str, Any], output_dir: Path, recording: Path | None, *, async_save: bool = False, real_engines: bool = False, timeout_s: float
) -> Iterator[tuple[Ranks, mmap.mmap]]:
    """A running `train`, and where `wait_for` reads what the driver does. `real_engines`: vLLM's, which need no recording."""
    values = values | {"trainer": values["trainer"] | {"output_dir": str(output_dir)}, "checkpoint": values["checkpoint"] | {"async_save": async_save}}
    path = output_dir.with_suffix(".place")
    path.write_bytes(bytes(_LONGEST_PLACE + 2))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as marker:
        with start_ranks(_rank, 2, values, recording, real_engines, path, timeout_s=timeout_s, process_group=False) as ranks:
            yield ranks, marker


def _rank(rank: int, world_size: int, values: dict[str, Any], recording: Path | None, real_engines: bool, path: Path) -> None:
    if not real_engines:
        otb_megatron.trainer.run.Engines = RecordedEngines  # type: ignore[misc, assignment]
        RecordedEngines.recording = recording
    if rank == 0:
        _mark_places(path)
    run(validate_config(values, "test"), "train")


def _mark_places(path: Path) -> None:
    """Writes into the file at `path` which phase the driver is in, how many it has begun, and whether a checkpoint is being written."""
    with path.open("r+b") as file:
        marker = mmap.mmap(file.fileno(), 0)
    phase, write_files = PhaseTimer.phase, checkpoint.Writing._write_files

    @contextlib.contextmanager
    def marked_phase(self: PhaseTimer, name: str) -> Iterator[None]:
        marker[_LONGEST_PLACE + 1] = (marker[_LONGEST_PLACE + 1] + 1) % 256
        marker[:_LONGEST_PLACE] = name.encode().ljust(_LONGEST_PLACE, b"\0")
        with phase(self, name):
            yield
        marker[:_LONGEST_PLACE] = b"between".ljust(_LONGEST_PLACE, b"\0")

    def marked_write(self: Any, *args: Any) -> None:
        marker[_LONGEST_PLACE] = 1
        write_files(self, *args)
        marker[_LONGEST_PLACE] = 0

    PhaseTimer.phase = marked_phase  # type: ignore[method-assign, assignment]
    checkpoint.Writing._write_files = marked_write  # type: ignore[method-assign]


def place_of(marker: mmap.mmap) -> str:
    """The phase that the driver is in, and whether a checkpoint is being written outside the phase that is for it."""
    phase = marker[:_LONGEST_PLACE].rstrip(b"\0").decode()
    return phase + (IN_BACKGROUND if marker[_LONGEST_PLACE] and phase != "checkpoint" else "")


def wait_for(ranks: Ranks, marker: mmap.mmap, place: str, *, times: int) -> None:
    """Until the driver has entered the phase `place` that often from now on; "anywhere" is the first phase of all."""
    entered, count = 0, marker[_LONGEST_PLACE + 1]
    wanted = place.encode().ljust(_LONGEST_PLACE, b"\0")
    while entered < times:
        assert ranks.is_running(), "a rank ended before it was killed:" + str(_failure(ranks))
        begun = marker[_LONGEST_PLACE + 1]
        if begun != count:
            count = begun
            entered += place == "anywhere" or marker[:_LONGEST_PLACE] == wanted
        time.sleep(0.0005)


def _failure(ranks: Ranks) -> object:
    try:
        return ranks.results()
    except AssertionError as error:
        return error


def check_disk(root: Path) -> int:
    """Every checkpoint under its final name is whole. Returns the step of the latest."""
    if not root.exists() or (newest := checkpoint.latest(root)) is None:
        return 0
    for directory in root.glob("step_*"):
        checkpoint.read_state(directory)
        checksums.check(directory, 0, 1)
    return checkpoint.read_state(newest)["step"]


def _assert_gone(groups: list[int], timeout_s: float = 5.0) -> None:
    """No process of the killed groups is left after a few seconds."""
    deadline = time.monotonic() + timeout_s
    while alive := [process for process in psutil.process_iter() if _is_alive_in(process, groups)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def _is_alive_in(process: psutil.Process, groups: list[int]) -> bool:
    try:
        return os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
