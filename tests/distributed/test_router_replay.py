"""Recorded experts are used exactly, in every layout and under recompute, and the routers are trained through them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import run_ranks
from tests.distributed.moe_gradients import PACKS, Step, difference, megatron_step, samples, transformers_step
from tests.distributed.training import settings
from tests.models import make_model

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "full recompute": (1, {}, FULL),
    "recompute of one layer": (1, {}, BLOCK),
    "selective recompute": (1, {}, SELECTIVE),
    "tp2_sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True), SELECTIVE),
    "pp2": (2, dict(pipeline_model_parallel_size=2), FULL),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), {}),
    "pp2_vpp2 full recompute": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), FULL),
    "cp2": (2, dict(context_parallel_size=2), FULL),
    "ep2": (2, dict(expert_model_parallel_size=2), SELECTIVE),
    "tp2_sp_cp2_ep2": (4, dict(tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2, expert_model_parallel_size=2), FULL),
    "tp2_sp_pp2": (4, dict(tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2), {}),
}


def values(model_dir: Path, work: Path, parallel: dict[str, Any], megatron: dict[str, Any]) -> dict[str, Any]:
    return settings(model_dir, work, parallel=parallel, megatron=megatron, optimizer={"use_distributed_optimizer": False})


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Step]:
    work = tmp_path_factory.mktemp("one")
    make_model(work / "model", "qwen3_moe")
    return work, run_ranks(megatron_step, 1, values(work / "model", work, {}, {}), samples(recorded=True), PACKS, timeout_s=120)[0]


def test_recorded_experts_are_used_exactly(one_process: tuple[Path, Step]) -> None:
    """Against transformers in float64 with its gates' choice replaced. Random records differ from the routers' own choice about half the time."""
    work, step = one_process
    expected = transformers_step(work / "model", samples(recorded=True))
    assert difference(step, expected) < 5e-5
    assert step.metrics["moe/router_disagreement"] == pytest.approx(expected.metrics["moe/router_disagreement"])
    assert 0.3 < step.metrics["moe/router_disagreement"] < 0.7
    own = transformers_step(work / "model", samples(recorded=False))
    assert difference(own, expected) > 0.5  # so a record that was lost shows
    for layer in range(4):
        assert float(step.gradient[f"model.layers.{layer}.mlp.gate.weight"].abs().max()) > 1e-4


def test_weights_that_are_not_renormalised_come_from_all_experts(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3_moe_unnormalised")
    step = run_ranks(megatron_step, 1, values(tmp_path / "model", tmp_path, {}, {}), samples(recorded=True), PACKS, timeout_s=120)[0]
    assert difference(step, transformers_step(tmp_path / "model", samples(recorded=True))) < 5e-5


def test_gpt_oss_trains_its_biases_and_sinks(tmp_path: Path) -> None:
    """Against transformers in float64, through recorded experts; and the same under sequence, context and expert parallelism with recompute.

    Each kind of gradient is summed over other ranks: sinks over those with other tokens, biases of row-parallel layers and of the router over those with
    other rows, biases of experts over those that hold the same experts.
    """
    make_model(tmp_path / "model", "gpt_oss_moe")
    expected = transformers_step(tmp_path / "model", samples(recorded=True))
    for world_size, parallel, megatron in ((1, {}, {}), CASES["tp2_sp_cp2_ep2"], CASES["tp2_sp"]):
        step = run_ranks(megatron_step, world_size, values(tmp_path / "model", tmp_path, parallel, megatron), samples(recorded=True), PACKS, timeout_s=240)[0]
        assert difference(step, expected) < 5e-5, parallel
        assert step.metrics["moe/router_disagreement"] == pytest.approx(expected.metrics["moe/router_disagreement"])
    for name in ("self_attn.sinks", "self_attn.o_proj.bias", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"):
        assert all(float(step.gradient[f"model.layers.{layer}.{name}"].abs().max()) > 1e-5 for layer in range(4)), name


@pytest.mark.parametrize("case", CASES)
def test_every_layout_and_recompute_gives_the_gradient_of_one_process(one_process: tuple[Path, Step], case: str) -> None:
    work, expected = one_process
    world_size, parallel, megatron = CASES[case]
    found = run_ranks(megatron_step, world_size, values(work / "model", work, parallel, megatron), samples(recorded=True), PACKS, timeout_s=240)[0]
    assert difference(found, expected) < 1e-5
    assert found.metrics["moe/router_disagreement"] == pytest.approx(expected.metrics["moe/router_disagreement"], abs=1e-12)
