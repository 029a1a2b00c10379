"""Every parameter of every architecture is of one kind of layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.kinds import layer_kind
from tests.models import CONFIGS


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # 4 layers: two norms each and the final one; linear_qkv, linear_proj (and a bias); fc1 and fc2.
        ("llama", {"embedding": 1, "norm": 9, "attention": 8, "mlp": 8, "output": 1}),
        ("qwen2", {"embedding": 1, "norm": 9, "attention": 12, "mlp": 8, "output": 1}),
        ("qwen3_tied", {"embedding_and_output": 1, "norm": 17, "attention": 8, "mlp": 8}),
        ("qwen3_moe", {"embedding": 1, "norm": 17, "attention": 8, "router": 4, "experts": 32, "output": 1}),
        # Sinks and the bias of linear_proj besides those of Qwen2; a router with a bias; four experts of two weights and two biases.
        ("gpt_oss_moe", {"embedding": 1, "norm": 9, "attention": 20, "router": 8, "experts": 64, "output": 1}),
        # One layer is dense, three have a router with its bias, 8 experts and the shared one; five projections and two more norms of attention.
        ("deepseek_v3_moe", {"embedding": 1, "norm": 17, "attention": 20, "mlp": 2, "router": 6, "experts": 54, "output": 1}),
    ],
)
def test_parameters_by_kind(tmp_path: Path, kind: str, counts: dict[str, int]) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert Counter(layer_kind(rule.megatron, tied=model.tied) for rule in model.rules(104)) == counts


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="decoder.layers.0.mixer.weight is of no layer kind"):
        layer_kind("decoder.layers.0.mixer.weight", tied=False)
