"""What the walks through the project share: a directory of their own, commands on this terminal, memory, greedy answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from otb_megatron.config import Config
from otb_megatron.types import Prompt, UserError


class PeakMemory:
    """Samples the resident memory of this process and all below it. Pages that processes share count once for each: an upper bound."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(psutil.Process()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident_bytes(root: psutil.Process) -> int:
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # it ended since the list was made
            continue
    return total


def prepare(output: Path, marker: str) -> None:
    """Makes `output` empty. Raises UserError if it holds anything without the file `marker`, which an earlier walk has left there."""
    if output.exists() and any(output.iterdir()):
        if not (output / marker).exists():
            raise UserError(f"--output {output} holds files that no earlier walk has left; name a new directory")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / marker).touch()


@dataclass(frozen=True)
class Ran:
    """A command that has ended well."""

    seconds: float
    peak_bytes: int  # of all its processes
    output: str  # empty unless it was kept


def run_command(title: str, arguments: Sequence[str], *, keep_output: bool = False) -> Ran:
    """Runs `otb-megatron ARGUMENTS` with its output on this terminal; ends this program if it fails.

    Args:
        keep_output: return the output too; it is then shown when the command has ended.
    """
    print(f"\n== {title}\n   otb-megatron {' '.join(arguments)}", flush=True)
    started = time.monotonic()
    # One thread for each rank: with more, two ranks on two cores would wait for each other's threads. Bars for tiny files are noise.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-m", "otb_megatron.cli", *arguments]
    with PeakMemory() as memory:
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE if keep_output else None, text=True)
    if keep_output:
        print(ended.stdout, end="", flush=True)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    return Ran(time.monotonic() - started, memory.peak_bytes, ended.stdout or "")


def answers_of_transformers(model_dir: Path, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """Greedy answers of at most `limit` tokens, the end included. Prompts of one length at a time, so that nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    end = model.generation_config.eos_token_id
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(index)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    for length, indices in by_length.items():
        ids = torch.tensor([prompts[index].token_ids for index in indices])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)[:, length:].tolist()
        for index, row in zip(indices, generated, strict=True):
            answers[index] = tuple(row[: row.index(end) + 1] if end in row else row)  # what follows the end is filling
    return answers


def answers_of_vllm(config: Config, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Greedy answers of vLLM with the weights at `config.model.path`, of at most `rollout.max_response_tokens` tokens."""
    from otb_megatron.rollout.pool import RolloutPool

    limit = config.rollout.max_response_tokens
    with RolloutPool(
        config.rollout, model_dir=config.model.path, dtype=config.model.dtype, max_prompt_tokens=config.data.max_prompt_tokens, load_weights=True
    ) as pool:
        responses = pool.generate(prompts, n=1, temperature=0.0, max_response_tokens=limit, seed=None)
    return [response.token_ids for (response,) in responses]
