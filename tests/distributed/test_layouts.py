"""The same recorded samples give the same advantages, metrics and weights in every parallel layout.

The reference is one process. Differences are float32 rounding: each layout sums in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.training import Outcome, largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict(tensor_model_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "cp2": (2, dict(context_parallel_size=2)),
    "dp2": (2, dict()),
    "tp2_pp2": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "tp2_cp2_sp": (4, dict(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)),
    "ep2": (2, dict(expert_model_parallel_size=2)),
    "tp2_sp_ep2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
    "tp2_sp_etp2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2)),
}
TESTED = {
    "qwen3_tied": ["tp2", "tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "tp2_pp2", "tp2_cp2_sp"],
    "qwen3_moe": ["tp2_sp", "pp2", "pp2_vpp2", "cp2", "dp2", "tp2_cp2_sp", "ep2", "tp2_sp_ep2", "tp2_sp_etp2"],
}
COMPARED_METRICS = ("policy/entropy", "policy/energy", "policy/log_prob", "advantages/std", "loss/total", "optimizer/grad_norm")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Per model: the directory of its recording, and what one process computes from it."""
    found = {}
    for kind in TESTED:
        work = tmp_path_factory.mktemp(kind)
        make_model(work / "model", kind)
        record_samples(work / "rollouts", vocab_size=VOCAB_SIZE)
        found[kind] = (work, train(settings(work / "model", work), 1))
    return found


def _check(outcome: Outcome, expected: Outcome, tolerance: float = 2e-5) -> None:
    assert len(expected.advantages) == 3
    for got, want in zip(outcome.advantages, expected.advantages, strict=True):
        assert got.shape == want.shape
        assert float((got - want).abs().max()) < tolerance
    for got, want in zip(outcome.metrics, expected.metrics, strict=True):
        for name in COMPARED_METRICS:
            assert got[name] == pytest.approx(want[name], rel=tolerance, abs=tolerance / 10), name
    assert largest_difference(outcome.weights, expected.weights) < tolerance


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, layouts in TESTED.items() for layout in layouts])
def test_layout_equals_one_process(references: dict[str, tuple[Path, Outcome]], tmp_path: Path, kind: str, layout: str) -> None:
    work, expected = references[kind]
    world_size, parallel = LAYOUTS[layout]
    values = settings(work / "model", work, parallel=parallel)
    values["trainer"]["output_dir"] = str(tmp_path / "run")
    _check(train(values, world_size), expected)


FULL_OBJECTIVE = {
    "advantage": "rloo",
    "aggregation": "seq-mean-token-mean",
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "rollout_correction": "truncated",
    "optimizer_steps_per_rollout": 2,
}


def test_every_term_of_the_objective_is_free_of_the_layout(references: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> None:
    """KL, entropy bonus, correction weights, two optimizer steps a rollout and another aggregation, at TP2 x CP2 with SP."""
    work, _ = references["qwen3_tied"]
    outcomes = []
    for name, world_size, parallel in (("one", 1, {}), ("many", *LAYOUTS["tp2_cp2_sp"])):
        values = settings(work / "model", work, parallel=parallel, algorithm=FULL_OBJECTIVE)
        values["trainer"]["output_dir"] = str(tmp_path / name)
        outcomes.append(train(values, world_size))
    _check(outcomes[1], outcomes[0], tolerance=5e-5)


def test_bfloat16_trains_in_any_layout_within_its_rounding(references: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> None:
    """Float32 masters and gradients: TP2 differs from one process by bfloat16 rounding (8 bits, 2^-8 = 0.4 %) of activations and weights."""
    work, _ = references["qwen3_tied"]
    outcomes = []
    for name, world_size, parallel in (("one", 1, {}), ("two", *LAYOUTS["tp2"])):
        values = settings(work / "model", work, parallel=parallel, optimizer={"lr": 1e-3, "adam_eps": 1e-4})
        values["model"]["dtype"] = "bfloat16"
        values["trainer"]["output_dir"] = str(tmp_path / name)
        outcomes.append(train(values, world_size))
    one, two = outcomes
    assert all(tensor.dtype == torch.bfloat16 for tensor in two.weights.values())
    assert largest_difference({n: t.float() for n, t in two.weights.items()}, {n: t.float() for n, t in one.weights.items()}) < 0.02
    assert two.metrics[0]["policy/entropy"] == pytest.approx(one.metrics[0]["policy/entropy"], rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"trainer": {"max_tokens_per_microbatch": 24}},
        {"trainer": {"max_tokens_per_microbatch": 100_000}},
        {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}},
        {"optimizer": {"use_distributed_optimizer": False}},
    ],
    ids=["small packs", "one pack", "recompute", "replicated optimizer"],
)
def test_packing_recompute_and_optimizer_sharding_change_nothing(references: dict[str, tuple[Path, Outcome]], tmp_path: Path, change: dict) -> None:
    work, expected = references["qwen3_tied"]
    values = settings(work / "model", work)
    for section, entries in change.items():
        values[section] = values.get(section, {}) | entries
    values["trainer"]["output_dir"] = str(tmp_path / "run")
    _check(train(values, 1), expected)
