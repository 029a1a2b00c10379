"""A family's bridge in rules and settings of this package, on plain objects with the attributes of Megatron-Bridge 0.6.2.

The family is Hy V3, which has no table here. `make test-bridge` does the same with the real package.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from transformers import HYV3ForCausalLM, PreTrainedConfig

from otb_megatron.mcore.bridge import find_bridge
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from otb_megatron.weights.layout import GatedPair, GroupedQKV, PaddedVocabulary, Whole
from otb_megatron.weights.rules import Rule
from tests.models import HY_V3, random_model


@dataclass
class AutoMapping:
    megatron_param: str
    hf_param: Any
    permute_dims: tuple[int, ...] | None = None


class ReplicatedMapping(AutoMapping):
    pass


class RowParallelMapping(AutoMapping):
    pass


class QKVMapping(AutoMapping):
    pass


class GatedMLPMapping(AutoMapping):
    pass


class SqueezedMapping(AutoMapping):
    """A family's own kind."""


def default_layer_spec(provider: Any) -> None: ...


def own_layer_spec(provider: Any) -> None: ...


def get_gpt_decoder_block_spec(provider: Any, use_transformer_engine: bool) -> None: ...


@dataclass
class GPTModelProvider:
    """The fields that the translation looks at and two that it does not know, with the defaults of 0.6.2."""

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    layernorm_epsilon: float = 1e-5
    qk_layernorm: bool = False
    add_qkv_bias: bool = False
    num_moe_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_load_balancing_type: str = "aux_loss"
    transformer_layer_spec: Callable = default_layer_spec
    position_embedding_type: str = "learned_absolute"
    share_embeddings_and_output_weights: bool = True
    rotary_base: float = 10000
    vocab_size: int | None = None
    normalization: str = "LayerNorm"
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    activation_func: Callable = F.gelu
    bf16: bool = False
    window_size: tuple[int, int] | None = None
    rotary_interleaved: bool = False
    dampers: list[int] = field(default_factory=list)


class OwnModelProvider(GPTModelProvider):
    pass


class Registry:
    """Looks mappings up as MegatronMappingRegistry does: a star stands for a number."""

    def __init__(self, *mappings: AutoMapping) -> None:
        self.mappings = list(mappings)

    def megatron_to_hf_lookup(self, name: str) -> AutoMapping | None:
        for mapping in self.mappings:
            if match := re.fullmatch(re.escape(mapping.megatron_param).replace(r"\*", r"(\d+)"), name):
                filled = partial(_filled, numbers=match.groups())
                names = mapping.hf_param
                return type(mapping)(
                    name, filled(names) if isinstance(names, str) else {key: filled(value) for key, value in names.items()}, mapping.permute_dims
                )
        return None


def _filled(pattern: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


class MegatronModelBridge:
    CONFIG_MAPPING = [
        ("vocab_size", "vocab_size"),
        ("tie_word_embeddings", "share_embeddings_and_output_weights"),
        ("max_position_embeddings", "seq_length"),
        ("rope_scaling.factor", "rope_scaling_factor"),
        ("scoring_func", "moe_router_score_function"),
        ("kv_lora_rank", "kv_lora_rank"),
    ]

    def maybe_modify_loaded_hf_weight(self) -> None: ...

    def build_conversion_tasks(self) -> None: ...


class HYV3Bridge(MegatronModelBridge):
    """As megatron/bridge/models/hy_v3/hy_v3_bridge.py sets it, but for the drafting layers."""

    provider_class = GPTModelProvider

    def __init__(self, hf_config: PreTrainedConfig) -> None:
        self.hf_config = hf_config

    def provider_bridge(self, pretrained: SimpleNamespace) -> GPTModelProvider:
        config = pretrained.config
        names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps".split()
        values = {
            name: getattr(config, name) for name in [*names, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "tie_word_embeddings", "hidden_act"]
        }
        return self.provider_class(
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_hidden_size=values["intermediate_size"],
            num_attention_heads=values["num_attention_heads"],
            num_query_groups=values["num_key_value_heads"],
            kv_channels=values["head_dim"],
            layernorm_epsilon=values["rms_norm_eps"],
            vocab_size=values["vocab_size"],
            share_embeddings_and_output_weights=values["tie_word_embeddings"],
            rotary_base=config.rope_parameters["rope_theta"],
            num_moe_experts=values["num_experts"],
            moe_router_topk=values["num_experts_per_tok"],
            moe_ffn_hidden_size=values["moe_intermediate_size"],
            moe_shared_expert_intermediate_size=values["moe_intermediate_size"] * config.num_shared_experts,
            moe_layer_freq=[0] * config.first_k_dense_replace + [1] * (values["num_hidden_layers"] - config.first_k_dense_replace),
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_topk_scaling_factor=config.router_scaling_factor,
            moe_router_load_balancing_type="none",
            qk_layernorm=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            add_bias_linear=False,
            activation_func=F.silu,
            position_embedding_type="rope",
            transformer_layer_spec=partial(get_gpt_decoder_block_spec, use_transformer_engine=True),
            bf16=True,
        )

    def mapping_registry(self) -> Registry:
        layer, hf = "decoder.layers.*.", "model.layers.*."
        one = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight",
            "decoder.final_layernorm.weight": "model.norm.weight",
            layer + "input_layernorm.weight": hf + "input_layernorm.weight",
            layer + "pre_mlp_layernorm.weight": hf + "post_attention_layernorm.weight",
            layer + "self_attention.q_layernorm.weight": hf + "self_attn.q_norm.weight",
            layer + "self_attention.k_layernorm.weight": hf + "self_attn.k_norm.weight",
            layer + "mlp.router.expert_bias": hf + "mlp.expert_bias",
            layer + "mlp.linear_fc2.weight": hf + "mlp.down_proj.weight",
            layer + "mlp.experts.linear_fc2.weight*": hf + "mlp.experts.*.down_proj.weight",
            layer + "mlp.shared_experts.linear_fc2.weight": hf + "mlp.shared_mlp.down_proj.weight",
        }
        gated = {
            layer + "mlp.linear_fc1.weight": hf + "mlp.",
            layer + "mlp.experts.linear_fc1.weight*": hf + "mlp.experts.*.",
            layer + "mlp.shared_experts.linear_fc1.weight": hf + "mlp.shared_mlp.",
        }
        return Registry(
            *(AutoMapping(megatron, name) for megatron, name in one.items()),
            *(GatedMLPMapping(name, {"up": prefix + "up_proj.weight", "gate": prefix + "gate_proj.weight"}) for name, prefix in gated.items()),
            QKVMapping(layer + "self_attention.linear_qkv.weight", {part: f"{hf}self_attn.{part}_proj.weight" for part in "vkq"}),
            RowParallelMapping(layer + "self_attention.linear_proj.weight", hf + "self_attn.o_proj.weight"),
            ReplicatedMapping(layer + "mlp.router.weight", hf + "mlp.router.gate.weight"),
        )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    random_model(HY_V3).save_pretrained(tmp_path)
    return tmp_path


def _refused(directory: Path, bridge: Callable[[Any], Any]) -> str:
    with pytest.raises(UserError) as caught:
        load_model(directory, find_bridge=bridge)
    return str(caught.value)


def test_settings_are_those_of_the_provider(directory: Path) -> None:
    """4 layers, the first dense; 4 heads of 32 in 2 groups; 4 experts, of which 2 are chosen, and one shared."""
    assert load_model(directory, find_bridge=HYV3Bridge).settings == dict(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        layernorm_epsilon=1e-5,
        qk_layernorm=True,
        add_qkv_bias=False,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_layer_freq=[0, 1, 1, 1],
        moe_shared_expert_intermediate_size=32,
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.826,
    )


def test_rules_have_our_layouts_and_the_names_of_the_registry(directory: Path) -> None:
    rules = {rule.megatron: rule for rule in load_model(directory, find_bridge=HYV3Bridge).rules(104)}
    attention, hf, experts = "decoder.layers.3.self_attention.", "model.layers.3.", "decoder.layers.3.mlp.experts.local_experts.2."
    expected = [
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), PaddedVocabulary(vocab_size=97, padded_vocab_size=104)),
        Rule(attention + "linear_qkv.weight", tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"), GroupedQKV(num_groups=2, head_dim=32)),
        Rule(attention + "linear_proj.weight", (hf + "self_attn.o_proj.weight",), Whole(dim=1)),
        Rule("decoder.layers.3.mlp.router.weight", (hf + "mlp.router.gate.weight",), Whole()),
        Rule("decoder.layers.3.mlp.router.expert_bias", (hf + "mlp.expert_bias",), Whole()),
        Rule(experts + "linear_fc1.weight", (hf + "mlp.experts.2.gate_proj.weight", hf + "mlp.experts.2.up_proj.weight"), GatedPair(), "expert"),
        Rule(experts + "linear_fc2.weight", (hf + "mlp.experts.2.down_proj.weight",), Whole(dim=1), "expert"),
        Rule("decoder.layers.0.mlp.linear_fc2.weight", ("model.layers.0.mlp.down_proj.weight",), Whole(dim=1)),
    ]
    assert [rules[rule.megatron] for rule in expected] == expected
    assert not [name for name in rules if name.startswith("decoder.layers.0.mlp.router")]


def test_every_tensor_of_a_checkpoint_has_one_rule(directory: Path) -> None:
    """As transformers writes them, whose own names within a model are others."""
    names = [name for rule in load_model(directory, find_bridge=HYV3Bridge).rules(104) for name in rule.hf]
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(directory).names


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"window_size": (127, 0)}, r"window_size=\(127, 0\) has no mapping"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True has no mapping"),
        ({"dampers": [1]}, r"dampers=\[1\] has no mapping"),
        ({"later_field": 3}, "later_field=3 has no mapping"),
        ({"normalization": "LayerNorm"}, r"normalization='LayerNorm' \(only 'RMSNorm'\)"),
        ({"add_bias_linear": True}, r"add_bias_linear=True \(only False\)"),
        ({"activation_func": F.gelu}, r"activation_func=gelu \(only silu\)"),
        ({"transformer_layer_spec": own_layer_spec}, "builds its layers with own_layer_spec"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type='learned_absolute'"),
        ({"rotary_base": 500000}, "rope_theta=11158840.0 of config.json is not followed: rotary_base=500000"),
        ({"vocab_size": 98}, "vocab_size=97 of config.json is not followed: vocab_size=98"),
        ({"share_embeddings_and_output_weights": True}, "tie_word_embeddings=False of config.json is not followed: share_embeddings_and_output_weights=True"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias=False with sigmoid scores"),
        ({"moe_router_score_function": "softmax"}, "moe_router_enable_expert_bias=True with softmax scores"),
        ({"moe_layer_freq": "[0]+[1]*3"}, r"moe_layer_freq='\[0\]\+\[1\]\*3'"),
        ({"moe_shared_expert_intermediate_size": 33}, "moe_shared_expert_intermediate_size=33 is no multiple of moe_ffn_hidden_size=32"),
        ({"moe_router_topk": 1}, "num_experts_per_tok=1"),
        ({"add_qkv_bias": True}, r"decoder.layers.0.self_attention.linear_qkv.bias: there is no mapping"),
    ],
)
def test_a_field_of_the_provider_that_cannot_be_followed_is_named(directory: Path, change: dict[str, Any], fault: str) -> None:
    class Changed(HYV3Bridge):
        def provider_bridge(self, pretrained: SimpleNamespace) -> GPTModelProvider:
            provider = super().provider_bridge(pretrained)
            vars(provider).update(change)
            return provider

    assert re.search(fault, _refused(directory, Changed))


def _with(*mappings: AutoMapping) -> type[HYV3Bridge]:
    class Changed(HYV3Bridge):
        def mapping_registry(self) -> Registry:
            return Registry(*mappings, *super().mapping_registry().mappings)

    return Changed


@pytest.mark.parametrize(
    ("mapping", "fault"),
    [
        (SqueezedMapping("decoder.layers.*.mlp.router.expert_bias", "b"), "mlp.router.expert_bias: SqueezedMapping has no layout here"),
        (AutoMapping("decoder.layers.*.mlp.router.weight", "r", (1, 0)), r"mlp.router.weight: permute_dims=\(1, 0\)"),
        (AutoMapping("decoder.layers.*.mlp.linear_fc1.weight", "gate_up"), r"mlp.linear_fc1.weight: AutoMapping \(only GatedMLPMapping\)"),
        (AutoMapping("decoder.layers.*.self_attention.linear_qkv.weight", "qkv"), r"linear_qkv.weight: AutoMapping \(only QKVMapping\)"),
        (RowParallelMapping("decoder.layers.*.mlp.router.weight", "r"), "mlp.router.weight: RowParallelMapping, but its shards lie along None"),
    ],
)
def test_a_mapping_that_no_layout_does_is_named(directory: Path, mapping: AutoMapping, fault: str) -> None:
    assert re.search(fault, _refused(directory, _with(mapping)))


def test_what_converts_weights_beside_the_registry_is_named_with_everything_else(directory: Path) -> None:
    class Hooked(HYV3Bridge):
        provider_class = OwnModelProvider

        def maybe_modify_loaded_hf_weight(self) -> None: ...

    message = _refused(directory, Hooked)
    assert "model_type 'hy_v3' has no weight mapping" in message and "Megatron-Bridge's Hooked" in message
    assert "its maybe_modify_loaded_hf_weight() changes weights" in message and "builds its model with OwnModelProvider" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"mlp_layer_types": ["sparse"] * 4}, "no mapping to Megatron-Core for mlp_layer_types"),  # transformers reads it, the bridge does not
        ({"enable_moe_fp32_combine": False}, "no mapping to Megatron-Core for enable_moe_fp32_combine=False"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' of config.json is not followed: moe_router_score_function='sigmoid'"),
        ({"kv_lora_rank": 8}, "kv_lora_rank=8 of config.json is not followed: kv_lora_rank=None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' (only 'silu')"),
        ({"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_a_field_that_is_not_followed_is_refused(directory: Path, change: dict[str, Any], part: str) -> None:
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(stored | change))
    assert part in _refused(directory, HYV3Bridge)


def test_a_field_without_effect_is_left_alone(directory: Path) -> None:
    """`mlp_layer_types` as it follows from the number of layers, a default written out, and a field that transformers does not have."""
    stored = json.loads((directory / "config.json").read_text())
    extra = {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "enable_moe_fp32_combine": True, "expert_hidden_dim": 32}
    (directory / "config.json").write_text(json.dumps(stored | extra))
    assert load_model(directory, find_bridge=HYV3Bridge).settings["moe_layer_freq"] == [0, 1, 1, 1]


def test_a_bridge_that_cannot_read_the_configuration_is_named(directory: Path) -> None:
    stored = json.loads((directory / "config.json").read_text())
    del stored["first_k_dense_replace"]
    (directory / "config.json").write_text(json.dumps(stored))
    assert "Megatron-Bridge's HYV3Bridge cannot read this config.json: AttributeError" in _refused(directory, HYV3Bridge)


def test_without_megatron_bridge_the_error_names_it_and_its_pins(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = _refused(directory, find_bridge)
    assert "model_type 'hy_v3' has no weight mapping; known: deepseek_v2" in message
    assert "Megatron-Bridge, which knows more families, is not installed: megatron-bridge 0.6.2 wants transformers 5.12.1 at most" in message


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package in the place of Megatron-Bridge that knows Hy V3 by the class of transformers."""

    def get_model_bridge(architecture: Any, hf_config: Any) -> HYV3Bridge:
        if architecture is not HYV3ForCausalLM:
            raise NotImplementedError
        return HYV3Bridge(hf_config)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for name in ("megatron.bridge", "megatron.bridge.models", "megatron.bridge.models.conversion"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = ModuleType("megatron.bridge.models.conversion.model_bridge")
    vars(module)["get_model_bridge"] = get_model_bridge
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_bridge_is_found_by_the_architecture(directory: Path, installed: ModuleType) -> None:
    assert load_model(directory, find_bridge=find_bridge).settings["moe_router_topk_scaling_factor"] == 2.826


def test_a_family_that_it_does_not_know_is_named(directory: Path, installed: ModuleType) -> None:
    stored = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(stored | {"architectures": ["SomeForCausalLM"]}))
    assert "Megatron-Bridge does not know SomeForCausalLM either" in _refused(directory, find_bridge)
    (directory / "config.json").write_text(json.dumps({key: value for key, value in stored.items() if key != "architectures"}))
    assert "config.json names no architectures" in _refused(directory, find_bridge)


def test_what_its_import_lacks_is_named(directory: Path, installed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, installed.__name__, None)
    assert "Megatron-Bridge is installed but cannot be imported: import of megatron.bridge.models.conversion.model_bridge halted" in _refused(
        directory, find_bridge
    )


def test_a_family_that_transformers_does_not_know_is_refused_before_a_bridge_is_asked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_family"}))
    assert "model_type 'no_such_family' has no weight mapping" in _refused(tmp_path, lambda config: pytest.fail("asked"))
