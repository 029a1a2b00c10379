"""A run with a critic through the command line: the shipped configuration on recorded samples, its checkpoint, its export, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from otb_megatron import cli
from otb_megatron.weights.files import Checkpoint
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "qwen3_tiny_sums_vapo_cpu.yaml"
NUM_STEPS = 4


def _launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", "--nproc-per-node", "2", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The shipped configuration on a random model and its recorded samples, without engines."""
    work = tmp_path_factory.mktemp("critic")
    make_model(work / "model", "qwen3_tied")
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE, num_steps=NUM_STEPS)
    settings(work / "model", work)  # writes the prompts
    places = [f"model.path={work / 'model'}", f"data.train.path={work / 'prompts.jsonl'}", f"rollout.replay_dir={work / 'rollouts'}"]
    small = ["model.make_vocab_size_divisible_by=8", "data.prompts_per_step=5", f"trainer.num_steps={NUM_STEPS}", "telemetry.tensorboard=false"]
    return [*places, *small, f"trainer.output_dir={work / 'run'}"]


def test_a_run_with_a_critic(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    ended = _launch(str(CONFIG), *overrides)
    assert ended.returncode == 0, ended.stderr[-4000:]
    run = Path(overrides[-1].partition("=")[2])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["critic/values"] == 0.0 and steps[1]["critic/values"] != 0.0
    for step in steps:
        assert step["critic/grad_norm"] > 0 and step["critic/lr"] == 1e-3 and step["critic/clip_fraction"] == 0.0
        assert ("optimizer/grad_norm" in step) == (step["step"] > 2)  # critic.warmup_steps
    checkpoint = run / "checkpoints" / f"step_{NUM_STEPS:08d}"
    assert sorted(path.name for path in checkpoint.iterdir()) == ["checksums.json", "critic", "policy", "state.json"]
    exported, original = Checkpoint(run / "export"), Checkpoint(Path(overrides[0].partition("=")[2]))
    assert exported.names == original.names  # the policy's, which has moved
    assert any(not torch.equal(exported.get(name), original.get(name)) for name in exported.names)

    # Another kind of estimator finds no use for the critic in this directory, and says so.
    assert cli.main(["train", str(CONFIG), *overrides, "parallel.tensor_model_parallel_size=1", "algorithm.advantage=rloo",
                     "algorithm.advantage_options={}", "critic={}", "trainer.num_steps=5"]) == 2  # fmt: skip
    told = capsys.readouterr().err
    assert "holds policy and critic" in told and "algorithm.advantage=rloo trains policy" in told and "Traceback" not in told


def test_a_full_resolved_configuration_loads_again(overrides: list[str], tmp_path: Path) -> None:
    """Every run writes the critic's section into its config.yaml; without a critic it holds the defaults, and those are not refused."""
    resolved = tmp_path / "resolved.yaml"
    without = ["algorithm.advantage=rloo", "algorithm.advantage_options={}", "critic={}"]
    cli.load(CONFIG, [*overrides, *without]).save(resolved)
    assert "warmup_steps" in yaml.safe_load(resolved.read_text())["critic"]
    assert cli.main(["plan", str(resolved), "--world-size", "2"]) == 0


CASES: dict[str, tuple[list[str], list[str]]] = {
    "a critic without use": (["algorithm.advantage=rloo", "algorithm.advantage_options={}"], ["critic.optimizer, critic.warmup_steps", "needs no values"]),
    "all warm-up": (["critic.warmup_steps=4"], ["critic.warmup_steps=4", "trainer.num_steps=4"]),
    "no critic model": (["critic.path=nowhere"], ["critic.path=nowhere", "no config.json"]),
    "clip range": (["critic.cliprange_value=0"], ["critic.cliprange_value=0"]),
    "learning rate": (["critic.optimizer.min_lr=1"], ["critic.optimizer.min_lr=1.0 is above critic.optimizer.lr=0.001"]),
    "unknown key": (["critic.optimizer.learning_rate=1"], ["critic.optimizer.learning_rate", "unknown key"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_message(case: str, overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    changes, parts = CASES[case]
    assert cli.main(["train", str(CONFIG), *overrides, "parallel.tensor_model_parallel_size=1", *changes]) == 2
    told = capsys.readouterr().err
    for part in parts:
        assert part in told
    assert told.count("error:") == 1 and "Traceback" not in told


def test_a_critic_of_another_vocabulary_is_refused(overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model(tmp_path / "other", "qwen3_tied")
    config: dict[str, Any] = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"vocab_size": 90}))
    assert cli.main(["train", str(CONFIG), *overrides, "parallel.tensor_model_parallel_size=1", f"critic.path={tmp_path / 'other'}"]) == 2
    told = capsys.readouterr().err
    assert "a vocabulary of 90" in told and "one of 97" in told


def test_the_plan_counts_both_networks(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """97 x 64 embedding + 4 layers of 67,776 + final norm 64 = 277,376 parameters a network; the embedding is tied and the value head not counted yet."""
    assert cli.main(["plan", str(CONFIG), *overrides, "--world-size", "2"]) == 0
    told = capsys.readouterr().out
    assert told.count("0.28 M parameters") == 2 and "2 of the policy, 4 of the critic" in told
