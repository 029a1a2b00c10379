"""A run killed in the middle and resumed ends exactly where an uninterrupted run does, fed the same recorded samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from otb_megatron.weights.files import Checkpoint
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

NUM_STEPS = 24  # long enough that the run is still going when the kill arrives


def _start(path: Path, output_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", "--nproc-per-node", "2", "train", str(path), f"trainer.output_dir={output_dir}"]
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _steps(output_dir: Path) -> list[dict[str, Any]]:
    metrics = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")] if metrics.exists() else []


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL of every process at some moment after the fourth step: weights bit for bit, learning rate and metrics to the last digit."""
    make_model(tmp_path / "model", "qwen3_tied")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE, num_steps=NUM_STEPS)
    values = settings(
        tmp_path / "model",
        tmp_path,
        parallel={"tensor_model_parallel_size": 2},
        optimizer={"lr": 1e-2, "lr_decay_style": "cosine", "lr_warmup_steps": 2},
        algorithm={"optimizer_steps_per_rollout": 2},
        trainer={"num_steps": NUM_STEPS, "max_tokens_per_microbatch": 64, "deadline_s": 60},
        checkpoint={"interval": 3},
    )
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))

    assert _start(path, tmp_path / "whole").wait(timeout=240) == 0

    killed = _start(path, tmp_path / "killed")
    deadline = time.monotonic() + 200
    while len(_steps(tmp_path / "killed")) < 4:
        assert killed.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    time.sleep(1)
    saved = int((tmp_path / "killed" / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert 3 <= saved < NUM_STEPS and saved % 3 == 0 and not (tmp_path / "killed" / "export").exists()
    assert _start(path, tmp_path / "killed").wait(timeout=240) == 0

    whole, resumed = Checkpoint(tmp_path / "whole" / "export"), Checkpoint(tmp_path / "killed" / "export")
    assert whole.names == resumed.names
    for name in whole.names:
        assert torch.equal(whole.get(name), resumed.get(name)), name
    without_times = [
        [{name: value for name, value in step.items() if not name.startswith("time/")} for step in _steps(tmp_path / run)] for run in ("whole", "killed")
    ]
    assert [step["step"] for step in without_times[0]] == list(range(1, NUM_STEPS + 1))
    assert without_times[0] == without_times[1]
