"""How long a checkpoint keeps training waiting, written at once and in the background.

    python -m tools.benchmarks.checkpoint --json checkpoint.json

One rank with a random model. Training is stood for by matrix products, whose rate is measured with and without a writer beside
them. What the disk takes for the same bytes, synced, comes from the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from otb_megatron.config import validate
from otb_megatron.mcore import checkpoint, checksums
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.learner import Learner
from otb_megatron.weights.architectures import load_model

REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--json", type=Path, help="also write the result there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.hidden_size)
    for name, value in result.items():
        print(f"{name:45s} {value:10.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(work: Path, hidden_size: int) -> dict[str, float]:
    """Medians over REPEATS, in seconds unless the name says otherwise."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=8, num_attention_heads=8, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).save_pretrained(work / "model")
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    learner, driver = _learner(work)
    for repeat in range(REPEATS):
        for in_background in (False, True):
            learner._config = _config(work, in_background)
            started = time.perf_counter()
            writing = learner.start_save(repeat + 1)
            waited_s = time.perf_counter() - started
            if in_background:
                note("background: products/s while writing", _rate(lambda writing=writing: not writing.is_written))
                note("background: until on the disk", time.perf_counter() - started)
            started = time.perf_counter()
            learner.complete_save(writing, {"step": repeat + 1}, is_best=False)
            note(f"{'background' if in_background else 'at once'}: training waits", waited_s + time.perf_counter() - started)
        directory = checkpoint.directory_of(learner.checkpoints, repeat + 1)
        files = [path for path in directory.rglob("*") if path.is_file()]
        note("size, MiB", sum(path.stat().st_size for path in files) / 2**20)
        note("copying the files, synced", _seconds(lambda files=files: _copy(files, work / "copy")))
        note("reading the checksums back", _seconds(lambda directory=directory: checksums.check(directory, 0, 1)))
        end = time.perf_counter() + 1
        note("products/s with nothing beside them", _rate(lambda end=end: time.perf_counter() < end))
    stop_parallel()
    return {name: statistics.median(values) for name, values in sorted(found.items())}


def _config(work: Path, in_background: bool) -> Any:
    values = {
        "model": {"path": str(work / "model"), "dtype": "float32"},
        "data": {"train": {"reasoning_gym": "chain_sum"}},
        "trainer": {"output_dir": str(work / "run")},
        "checkpoint": {"async_save": in_background},
    }
    return validate(values, "the benchmark")


def _learner(work: Path) -> tuple[Learner, Driver]:
    config = _config(work, False)
    parallel = start_parallel(config.parallel, seed=0, deadline_s=600)
    driver = Driver(parallel)
    return Learner(config, "train", load_model(config.model.path), parallel, driver), driver


def _rate(is_going: Any) -> float:
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    count, started = 0, time.perf_counter()
    while is_going():
        left @ right
        count += 1
    return count / (time.perf_counter() - started)


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _copy(files: list[Path], directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, directory / path.name)
        with (directory / path.name).open("rb") as file:
            os.fsync(file.fileno())


if __name__ == "__main__":
    main()
