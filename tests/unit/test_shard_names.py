"""Names of this rank's parameters over the whole model, for the layers of Transformer Engine that no CPU can build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import otb_megatron.mcore  # noqa: F401  megatron needs it first
from otb_megatron.mcore.shards import _global_name


def _model(ep_rank: int, ep_size: int) -> Any:
    ep = SimpleNamespace(rank=lambda: ep_rank, size=lambda: ep_size)
    return SimpleNamespace(parallel=SimpleNamespace(groups=SimpleNamespace(ep=ep)), config=SimpleNamespace(num_moe_experts=128))


CHUNK: Any = SimpleNamespace(decoder=SimpleNamespace(layers=[SimpleNamespace(layer_number=13), SimpleNamespace(layer_number=14)]))


@pytest.mark.parametrize(
    ("local", "whole"),
    [
        # the second of four ranks has experts 32 to 63; weight7 is the eighth of a grouped GEMM
        ("decoder.layers.1.mlp.experts.linear_fc1.weight7", "decoder.layers.13.mlp.experts.local_experts.39.linear_fc1.weight"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight31", "decoder.layers.13.mlp.experts.local_experts.63.linear_fc2.weight"),
        ("decoder.layers.1.mlp.experts.linear_fc1.bias7", "decoder.layers.13.mlp.experts.local_experts.39.linear_fc1.bias"),
        ("decoder.layers.1.self_attention.core_attention.softmax_offset", "decoder.layers.13.self_attention.core_attention.softmax_offset"),
        ("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", "decoder.layers.12.mlp.experts.local_experts.32.linear_fc1.weight"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.layers.12.mlp.shared_experts.linear_fc1.weight"),
        ("decoder.layers.0.mlp.router.weight", "decoder.layers.12.mlp.router.weight"),
        ("decoder.layers.0.mlp.router.expert_bias", "decoder.layers.12.mlp.router.expert_bias"),
        ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.12.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.12.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.12.pre_mlp_layernorm.weight"),
    ],
)
def test_names_count_layers_and_experts_of_the_whole_model(local: str, whole: str) -> None:
    assert _global_name(local, CHUNK, _model(ep_rank=1, ep_size=4)) == whole
