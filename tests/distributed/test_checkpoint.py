"""A checkpoint continues in another parallel layout as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import NUM_STEPS, Outcome, largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

SAVED_AT = {
    "qwen3_tied": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "qwen3_moe": (2, dict(expert_model_parallel_size=2)),
    "deepseek_v3_moe": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
}
CONTINUED_AT: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_tied", 1, dict()),
    ("qwen3_tied", 2, dict()),  # DP2
    ("qwen3_tied", 2, dict(pipeline_model_parallel_size=2)),
    ("qwen3_moe", 1, dict()),
    ("deepseek_v3_moe", 1, dict()),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Per model: a directory whose run stopped after two of three steps, and the outcome of an uninterrupted run in one process."""
    found = {}
    for kind, (world_size, parallel) in SAVED_AT.items():
        work = tmp_path_factory.mktemp(kind)
        make_model(work / "model", kind)
        record_samples(work / "rollouts", vocab_size=VOCAB_SIZE)
        whole = train(_settings(work, work / "whole", NUM_STEPS, {}), 1)
        train(_settings(work, work / "stopped", NUM_STEPS - 1, parallel), world_size)
        found[kind] = (work, whole)
    return found


def _settings(work: Path, output_dir: Path, num_steps: int, parallel: dict[str, Any]) -> dict[str, Any]:
    values = settings(work / "model", work, parallel=parallel, trainer={}, optimizer={"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "lr_decay_steps": 10})
    values["trainer"] |= {"num_steps": num_steps, "output_dir": str(output_dir)}
    return values


@pytest.mark.parametrize(("kind", "world_size", "parallel"), CONTINUED_AT)
def test_the_next_step_equals_the_uninterrupted_run(
    saved: dict[str, tuple[Path, Outcome]], tmp_path: Path, kind: str, world_size: int, parallel: dict[str, Any]
) -> None:
    work, whole = saved[kind]
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    (output_dir / "checkpoints").symlink_to(work / "stopped" / "checkpoints")
    values = _settings(work, output_dir, NUM_STEPS, parallel)
    values["checkpoint"] = {"keep_last": 10}
    outcome = train(values, world_size)
    assert [step["step"] for step in outcome.metrics] == [NUM_STEPS]
    assert outcome.metrics[0]["optimizer/grad_norm"] == pytest.approx(whole.metrics[-1]["optimizer/grad_norm"], rel=2e-5)
    assert largest_difference(outcome.weights, whole.weights) < 2e-5
    (work / "stopped" / "checkpoints" / "latest").write_text(f"step_{NUM_STEPS - 1:08d}\n")  # as it was, for the next layout


def test_the_state_of_the_driver_is_plain_json(saved: dict[str, tuple[Path, Outcome]]) -> None:
    work, _ = saved["qwen3_tied"]
    state = json.loads((work / "stopped" / "checkpoints" / f"step_{NUM_STEPS - 1:08d}" / "state.json").read_text())
    assert state["step"] == NUM_STEPS - 1 and state["order"]["num_prompts"] == 5
