"""A checkpoint continues in another parallel layout as if nothing had happened; `make test-faults` has more and larger layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resharding import assert_continues_at, save_at
from tests.distributed.training import NUM_STEPS, Outcome

SAVED_AT = {
    "qwen3_tied": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "qwen3_moe": (2, dict(expert_model_parallel_size=2)),
    "gpt_oss_moe": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
    "deepseek_v3_moe": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
}
CONTINUED_AT: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_tied", 1, dict()),
    ("qwen3_tied", 2, dict()),  # DP2
    ("qwen3_tied", 2, dict(pipeline_model_parallel_size=2)),
    ("qwen3_moe", 1, dict()),
    ("gpt_oss_moe", 1, dict()),
    ("deepseek_v3_moe", 1, dict()),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Per model: the directory of a run and its outcome."""
    found = {}
    for kind, (world_size, parallel) in SAVED_AT.items():
        work = tmp_path_factory.mktemp(kind)
        found[kind] = (work, save_at(work, kind, world_size, parallel))
    return found


@pytest.mark.parametrize(("kind", "world_size", "parallel"), CONTINUED_AT)
def test_the_next_step_equals_the_uninterrupted_run(
    saved: dict[str, tuple[Path, Outcome]], tmp_path: Path, kind: str, world_size: int, parallel: dict[str, Any]
) -> None:
    work, whole = saved[kind]
    assert_continues_at(work, tmp_path / "run", whole, world_size, parallel)


def test_the_state_of_the_driver_is_plain_json(saved: dict[str, tuple[Path, Outcome]]) -> None:
    work, _ = saved["qwen3_tied"]
    state = json.loads((work / "whole" / "checkpoints" / f"step_{NUM_STEPS - 1:08d}" / "state.json").read_text())
    assert state["step"] == NUM_STEPS - 1 and state["order"]["num_prompts"] == 5
