"""The main job on a tiny model: two ranks at TP=2, vLLM in a Ray actor, weights sent after every step, export and checks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.models import make_model

NUM_STEPS = 3
DEADLINES = {"start_timeout_s": 200, "generate_timeout_s": 100, "weight_transfer_timeout_s": 100}
REPOSITORY = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "otb_megatron.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("train")
    make_model(work / "model", "qwen3_tied")
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+{b}"}], "reward_model": {"ground_truth": str(a + b)}}
        for a in range(4)
        for b in range(4)
    ]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(work / "model"), "dtype": "float32", "make_vocab_size_divisible_by": 8},
        "data": {"train": {"path": str(work / "rows.jsonl")}, "validation": {"path": str(work / "rows.jsonl")}, "prompts_per_step": 8, "max_prompt_tokens": 16},
        "parallel": {"tensor_model_parallel_size": 2},
        "optimizer": {"lr": 1e-3},
        "rollout": {
            "n": 4,
            "temperature": 0.8,
            "max_response_tokens": 8,
            "save": True,
            "vllm": {"kv_cache_memory_bytes": 32 * 2**20},
            "dynamic_sampling": {},
            **DEADLINES,
        },
        "rewards": {"function": "tests.e2e.verifiers:digit_fraction"},
        "algorithm": {"kl_coef": 0.01, "entropy_coef": 0.001, "rollout_correction": "truncated"},
        "trainer": {"num_steps": NUM_STEPS, "output_dir": str(work / "run"), "max_tokens_per_microbatch": 256, "deadline_s": 240},
        "telemetry": {"tensorboard": False},
    }
    path = work / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_main_job(config: Path) -> None:
    ended = _run("launch", "--nproc-per-node", "2", "train", str(config))
    assert ended.returncode == 0, ended.stderr[-4000:]
    run = config.parent / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert "eval/accuracy" in steps[0] and "eval/accuracy" in steps[3]
    for number, step in enumerate(steps[1:], start=1):
        assert step["weights/version"] == number
        # vLLM samples from the very weights that Megatron then trains: after every update, at temperature 0.8.
        assert step["rollout/log_prob_difference"] < 2e-5
        assert step["optimizer/grad_norm"] > 0
        assert step["mismatch/kl_k3"] < 1e-9 and step["mismatch/effective_sample_size"] > 1 - 1e-9
        assert step["sampling/groups"] - step["sampling/groups_without_signal"] == 8 and step["sampling/groups_missing"] == 0
        assert step["policy/clip_fraction"] == 0  # one update a rollout: the ratio is exactly one
    assert steps[1]["loss/kl"] == 0.0  # policy and reference are the same weights in the same packs
    assert steps[2]["loss/kl"] > 0
    samples = (run / "rollouts").glob("*.jsonl")
    assert len(list(samples)) == NUM_STEPS
    assert "<img" in (run / "report.html").read_text()


def test_the_export_computes_what_the_checkpoint_does(config: Path) -> None:
    """After the main job: Megatron from the checkpoint, at TP=1 now, and transformers from the export."""
    ended = _run("convert", "verify", str(config))
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert float(ended.stdout.rsplit(":", 1)[1]) < 1e-5


def test_the_export_answers_as_the_trained_policy_did(config: Path) -> None:
    """A fresh engine on the export reproduces the accuracy that the trainer's engine measured after the last update."""
    result = config.parent / "eval.json"
    ended = _run("eval", str(config.parent / "run" / "export"), str(config), "--json", str(result))
    assert ended.returncode == 0, ended.stderr[-4000:]
    last = json.loads((config.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(result.read_text())["accuracy"] == pytest.approx(last["eval/accuracy"], abs=1e-9)


def test_a_signal_lets_the_engines_finish_the_running_step(config: Path) -> None:
    """SIGTERM to the launcher reaches the ranks alone: Ray, whose own handler would end the driver, and the verifiers go on until the run has saved."""
    run = config.parent / "stopped"
    overrides = [f"trainer.output_dir={run}", "trainer.num_steps=1000", "data.validation=null", "telemetry.progress=false"]
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", "--nproc-per-node", "2", "train", str(config), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    launched = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launched.send_signal(signal.SIGTERM)
    out, error = launched.communicate(timeout=120)
    assert launched.returncode == 0, error[-4000:]
    step = json.loads(metrics.read_text().splitlines()[-1])["step"]
    saved = run / "checkpoints" / f"step_{step:08d}"
    assert f"stopped by SIGTERM after step {step} of 1000: saved {saved}" in out and (saved / "checksums.json").exists()


def test_a_failing_verifier_ends_every_rank(config: Path) -> None:
    ended = _run("launch", "--nproc-per-node", "2", "train", str(config), "rewards.function=tests.e2e.verifiers:broken", "trainer.resume=auto",
                 f"trainer.output_dir={config.parent / 'failing'}")  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1 and "rewards.max_failures" in ended.stderr and "Traceback" not in ended.stderr
