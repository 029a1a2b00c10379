"""Saved at TP2 x PP2 x DP2 on 8 ranks, continued in every other kind of layout: `make test-faults`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resharding import assert_continues_at, save_at
from tests.distributed.training import Outcome

TP2_PP2 = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
SAVED_AT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3": (TP2_PP2, dict(num_key_value_heads=4)),  # divisible by 4 tensor-parallel ranks
    "qwen3_moe": (TP2_PP2 | dict(sequence_parallel=True, expert_model_parallel_size=2), dict()),
}
CONTINUED_AT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("qwen3", 1, dict()),
    "TP4": ("qwen3", 4, dict(tensor_model_parallel_size=4)),
    "PP4": ("qwen3", 4, dict(pipeline_model_parallel_size=4)),
    "DP4": ("qwen3", 4, dict()),
    "CP2 DP2": ("qwen3", 4, dict(context_parallel_size=2)),
    "MoE, one rank": ("qwen3_moe", 1, dict()),
    "MoE, EP2": ("qwen3_moe", 2, dict(expert_model_parallel_size=2)),
    "MoE, EP4": ("qwen3_moe", 4, dict(expert_model_parallel_size=4)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Per model: the directory of a run on 8 ranks and its outcome."""
    found = {}
    for kind, (parallel, changes) in SAVED_AT.items():
        work = tmp_path_factory.mktemp(kind)
        found[kind] = (work, save_at(work, kind, 8, parallel, **changes))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CONTINUED_AT)
def test_the_next_step_equals_the_uninterrupted_run(saved: dict[str, tuple[Path, Outcome]], tmp_path: Path, name: str) -> None:
    kind, world_size, parallel = CONTINUED_AT[name]
    work, whole = saved[kind]
    assert_continues_at(work, tmp_path / "run", whole, world_size, parallel)
