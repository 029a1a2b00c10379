"""A run killed, and one told to stop, and resumed end exactly where an uninterrupted run does, fed the same recorded samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from otb_megatron.weights.files import Checkpoint
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

NUM_STEPS = 30  # long enough that the run is still going when the kill arrives


def _start(path: Path, output_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", "--nproc-per-node", "2", "train", str(path), f"trainer.output_dir={output_dir}"]
    return subprocess.Popen(command, start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)


def _wait_for_steps(run: subprocess.Popen[bytes], output_dir: Path, first_step: int, count: int) -> None:
    """Until the run that starts at `first_step` has `count` steps recorded; before it does, those of the run before it are still there."""
    deadline, facts = time.monotonic() + 200, output_dir / "run.json"
    while not facts.exists() or json.loads(facts.read_text())["starts"][-1]["first_step"] != first_step or len(_steps(output_dir)) < count:
        assert run.poll() is None and time.monotonic() < deadline, "the run ended before it could be ended"
        time.sleep(0.02)


def _steps(output_dir: Path) -> list[dict[str, Any]]:
    metrics = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")] if metrics.exists() else []


@pytest.mark.timeout(600)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """SIGKILL of the launcher, which ends its ranks, at some moment after the fourth step, then, resumed, SIGUSR1 to the launcher:
    weights bit for bit, learning rate and metrics to the last digit."""
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
    _wait_for_steps(killed, tmp_path / "killed", 0, 4)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    deadline = time.monotonic() + 10
    while any(str(tmp_path) in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.1)
    saved = int((tmp_path / "killed" / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))
    assert 3 <= saved < NUM_STEPS and saved % 3 == 0 and not (tmp_path / "killed" / "export").exists()

    stopped = _start(path, tmp_path / "killed")
    _wait_for_steps(stopped, tmp_path / "killed", saved + 1, saved + 2)
    stopped.send_signal(signal.SIGUSR1)
    assert stopped.wait(timeout=240) == 0 and stopped.stdout is not None
    last = _steps(tmp_path / "killed")[-1]["step"]
    saved_at = tmp_path / "killed" / "checkpoints" / f"step_{last:08d}"
    line = f"stopped by SIGUSR1 after step {last} of {NUM_STEPS}: saved {saved_at}; the same command continues from there"
    assert stopped.stdout.read().decode().splitlines() == [line]
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
