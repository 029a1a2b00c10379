"""The same recorded samples give the same advantages, metrics and weights in every parallel layout.

The reference is one process. Differences are float32 rounding: each layout sums in another order.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.training import Outcome, largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

LAYOUTS = {
    "tp2": (2, dict(tensor_model_parallel_size=2)),
    "tp2_sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, dict(pipeline_model_parallel_size=2)),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "cp2": (2, dict(context_parallel_size=2)),
    "dp2": (2, dict()),
    "tp2_pp2": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "tp2_cp2_sp": (4, dict(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)),
}
MOE_LAYOUTS = {
    "ep2": (2, dict(expert_model_parallel_size=2)),
    "tp2_sp_ep2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
}
COMPARED_METRICS = ("policy/entropy", "policy/energy", "policy/log_prob", "advantages/std", "loss/total", "optimizer/grad_norm")


@pytest.fixture(scope="module", params=["qwen3_tied", "qwen3_moe"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path, Outcome]:
    work = tmp_path_factory.mktemp(request.param)
    make_model(work / "model", request.param)
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE)
    return request.param, work, work / "model", train(settings(work / "model", work), 1)


def _check(outcome: Outcome, expected: Outcome) -> None:
    assert len(expected.advantages) == 3
    for got, want in zip(outcome.advantages, expected.advantages, strict=True):
        assert got.shape == want.shape
        assert float((got - want).abs().max()) < 2e-5
    for got, want in zip(outcome.metrics, expected.metrics, strict=True):
        for name in COMPARED_METRICS:
            assert got[name] == pytest.approx(want[name], rel=2e-5, abs=2e-6), name
    assert largest_difference(outcome.weights, expected.weights) < 2e-5


@pytest.mark.parametrize("layout", [*LAYOUTS, *MOE_LAYOUTS])
def test_layout_equals_one_process(reference: tuple[str, Path, Path, Outcome], layout: str, tmp_path: Path) -> None:
    kind, work, model_dir, expected = reference
    if (layout in MOE_LAYOUTS) != (kind == "qwen3_moe"):
        return
    world_size, parallel = (LAYOUTS | MOE_LAYOUTS)[layout]
    values = settings(model_dir, work, parallel=parallel, trainer={})
    values["trainer"] = values["trainer"] | {"output_dir": str(tmp_path / "run")}
    _check(train(values, world_size), expected)
