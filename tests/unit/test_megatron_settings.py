"""What `megatron:` passes on, what it refuses and why, and what the sections become in Megatron-Core's own configurations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from otb_megatron.config import OptimizerConfig
from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.model import check_divisible, transformer_config
from otb_megatron.mcore.optimizer import megatron_optimizer_config
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel, load_model
from tests.distributed.training import settings
from tests.models import make_model


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("work")
    make_model(directory / "model", "qwen3_moe")
    return directory


@pytest.fixture(scope="module")
def model(work: Path) -> HuggingFaceModel:
    return load_model(work / "model")


def _build(work: Path, model: HuggingFaceModel, megatron: dict[str, Any], **parallel: Any) -> Any:
    config = validate_config(settings(work / "model", work, megatron=megatron, parallel=parallel), "test")
    check_divisible(config, model)
    return transformer_config(config, model)


@pytest.mark.parametrize(
    ("megatron", "parts"),
    [
        ({"window_size": [128, 0]}, ["megatron.window_size=[128, 0]", "another model than the config.json"]),
        ({"mtp_num_layers": 1}, ["megatron.mtp_num_layers=1", "another model"]),
        ({"moe_pad_expert_input_to_capacity": True}, ["its microbatch"]),
        ({"defer_embedding_wgrad_compute": True}, ["another training step"]),
        ({"cuda_graph_impl": "local"}, ["another training step"]),
        ({"microbatch_group_size_per_vp_stage": 3}, ["another training step"]),
        ({"deterministic_mode": True, "tp_comm_overlap": True}, ["same bits twice"]),
        ({"hidden_dropout": 0.1}, ["follows from the model"]),
        ({"calculate_per_token_loss": False}, ["follows from the model"]),
        ({"finalise_model_grads_func": 1, "window_size": [1, 0]}, ["did you mean 'finalize_model_grads_func'", "window_size"]),
    ],
)
def test_a_setting_that_would_compute_something_else_is_refused(work: Path, model: HuggingFaceModel, megatron: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        _build(work, model, megatron)
    assert all(part in str(error.value) for part in parts), error.value


def test_gpt_oss_in_terms_of_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second layer has a window of 5 tokens; with Transformer Engine context parallelism must be of the kind that knows windows and sinks."""
    make_model(tmp_path / "model", "gpt_oss_moe")
    model = load_model(tmp_path / "model")
    built = _build(tmp_path, model, {})
    assert (built.window_size, built.window_attn_skip_freq, built.softmax_type) == ((4, 0), [1, 0, 1, 0], "learnable")
    assert (built.activation_func_clamp_value, built.glu_linear_offset, built.add_bias_linear, built.cp_comm_type) == (7.0, 1.0, True, None)
    assert built.activation_func(torch.tensor(2.0)) == pytest.approx(2 / (1 + math.exp(-3.404)))  # 2 * 1.702
    monkeypatch.setattr("otb_megatron.mcore.model.uses_transformer_engine", lambda: True)
    assert _build(tmp_path, model, {}).cp_comm_type == "a2a"
    with pytest.raises(UserError, match="expert_tensor_parallel_size 2, but Megatron-Core does not cut experts with biases"):
        _build(tmp_path, model, {}, expert_tensor_parallel_size=2)


def test_a_fused_choice_that_ranks_groups_otherwise_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "deepseek_v2_moe")
    with pytest.raises(UserError, match="megatron.moe_router_fusion=True: the fused top-k ranks groups by a sum"):
        _build(tmp_path, load_model(tmp_path / "model"), {"moe_router_fusion": True})


def test_a_refused_setting_at_its_default_is_no_fault(work: Path, model: HuggingFaceModel) -> None:
    assert _build(work, model, {"moe_expert_capacity_factor": None, "overlap_moe_expert_parallel_comm": False}).moe_expert_capacity_factor is None


@pytest.mark.parametrize(
    ("megatron", "part"),
    [
        ({"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}, "2 middle layers remaining"),  # 4 layers on 2 stages
        ({"pipeline_model_parallel_layout": "Et|tt|t|L"}, "set parallel.virtual_pipeline_model_parallel_size=2"),
        ({"account_for_loss_in_pipeline_split": True}, "must be divisible"),  # 4 + 1 on 2 stages
        ({"account_for_loss_in_pipeline_split": False}, "num_hidden_layers 4 .* not divisible"),
    ],
)
def test_stages_that_do_not_hold_the_layers_are_refused(work: Path, model: HuggingFaceModel, megatron: dict[str, Any], part: str) -> None:
    stages = 3 if not any(megatron.values()) else 2
    with pytest.raises(UserError, match=part):
        _build(work, model, megatron, pipeline_model_parallel_size=stages)


def test_offloading_reaches_megatron_under_its_names() -> None:
    """The optimizer on two devices itself needs CUDA; `trainer.validate` refuses it without."""
    config = megatron_optimizer_config(OptimizerConfig(optimizer_offload_fraction=0.25), torch.bfloat16)
    assert config.optimizer_cpu_offload and config.optimizer_offload_fraction == 0.25 and config.use_precision_aware_optimizer
    config = megatron_optimizer_config(OptimizerConfig(), torch.bfloat16)
    assert not config.optimizer_cpu_offload and not config.use_precision_aware_optimizer
