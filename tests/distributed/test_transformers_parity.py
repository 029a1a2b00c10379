"""Statistics of the policy in Megatron against transformers in float64, and weights out of Megatron against those that went in.

What each family has of its own, in the layout that could break it. `make test-architectures` runs every family in every layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.parity import check, make_models

CASES = {
    "llama": ["tp2"],
    "mistral": ["pp2"],
    "qwen2": ["tp2_sp"],
    "qwen3": ["cp2", "pp2_vpp2"],
    "qwen3_window": ["cp2", "pp2_uneven", "pp2_vpp2"],
    "qwen3_tied": ["tp2", "pp2"],
    "qwen3_moe": ["cp2", "ep2", "pp2_uneven", "tp2_sp_etp2"],
    "qwen3_moe_unnormalised": ["ep2"],
    "mixtral_moe": ["tp2_sp_ep2"],
    "glm4_moe": ["tp2_sp", "pp2_vpp2", "cp2"],
    "gpt_oss_moe": ["tp2_sp_ep2", "pp2_uneven", "cp2", "ep2"],
    "deepseek_v2_moe": ["tp2_sp_ep2", "pp2"],
    "deepseek_v3_moe": ["tp2_sp", "pp2_uneven", "cp2", "ep2"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("models")
    make_models(work)
    return work


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind, layouts in CASES.items() for layout in layouts])
def test_statistics_equal_transformers_and_weights_come_out_as_they_went_in(models: Path, tmp_path: Path, kind: str, layout: str) -> None:
    check(models, tmp_path / "export", kind, layout)
