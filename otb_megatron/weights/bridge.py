"""Megatron-Bridge's description of a family that has no table here, as an `Architecture`: rules and settings like any other.

Nothing here imports Megatron-Bridge; `mcore/bridge.py` does. A family's bridge (a `MegatronModelBridge`) says three things, and each is put
into the terms of this package: which provider it configures from config.json, which the tables' own functions then turn into settings; which
Hugging Face tensors each parameter is made of, which take the place of the usual names in the tables' own rules; and which fields of config.json
it read, which are the ones understood. What a table could not say is refused. Written against Megatron-Bridge 0.6.2.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from transformers import PreTrainedConfig

from otb_megatron.types import UserError
from otb_megatron.weights import settings
from otb_megatron.weights.layout import GatedPair, GroupedQKV
from otb_megatron.weights.rules import Architecture, Rule, decoder_rules, routed_experts, with_attention

FindBridge = Callable[[PreTrainedConfig], Any]  # a family's MegatronModelBridge; raises UserError where there is none

_PROVIDER = "GPTModelProvider"  # a subclass builds a model of its own
_SPECS = ("default_layer_spec", "transformer_engine_layer_spec", "get_gpt_decoder_block_spec")  # layers as mcore/model.py builds them
# Methods that convert weights beside the registry.
_HOOKS = (
    "maybe_modify_loaded_hf_weight maybe_modify_converted_hf_weight build_conversion_tasks load_weights_hf_to_megatron stream_weights_hf_to_megatron "
    "stream_weights_megatron_to_hf"
).split()
_PARTS = {GroupedQKV: ("QKVMapping", ("q", "k", "v")), GatedPair: ("GatedMLPMapping", ("gate", "up"))}  # the keys of hf_param in our order
_SHARDED = {"ColumnParallelMapping": 0, "RowParallelMapping": 1, "ReplicatedMapping": None}  # the dimension; AutoMapping takes that of the module

# Fields of a provider that make the model and have one value here.
_ONLY = dict(normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, activation_func=F.silu)
# Fields that `_in_usual_names` or `_provider_faults` follow.
_FOLLOWED = frozenset(
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels layernorm_epsilon qk_layernorm add_qkv_bias num_moe_experts "
    "moe_router_topk moe_ffn_hidden_size moe_layer_freq moe_shared_expert_intermediate_size moe_router_score_function moe_router_pre_softmax "
    "moe_router_enable_expert_bias moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_load_balancing_type "
    "transformer_layer_spec position_embedding_type share_embeddings_and_output_weights rotary_base vocab_size".split()
)
# Fields of types, fusions, training and initialisation, which the run's own configuration sets, and of the scaling of RoPE, which is read from
# config.json (weights/rope.py). Drafting layers (mtp_) have no part in training.
_RUN = frozenset(
    "fp16 bf16 params_dtype autocast_dtype attention_softmax_in_fp32 hidden_dropout attention_dropout init_method_std init_method output_layer_init_method "
    "gradient_accumulation_fusion cross_entropy_loss_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm "
    "apply_rope_fusion deallocate_pipeline_outputs moe_grouped_gemm moe_permute_fusion moe_token_dispatcher_type moe_aux_loss_coeff moe_router_dtype "
    "moe_router_bias_update_rate moe_shared_expert_overlap mtp_num_layers mtp_enabled mtp_loss_scaling_factor seq_length make_vocab_size_divisible_by "
    "hf_model_id hf_model_revision rope_scaling rope_scaling_factor seq_len_interpolation_factor yarn_rotary_scaling_factor "
    "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int".split()
)


def architecture(find_bridge: FindBridge, config: PreTrainedConfig, stored: dict[str, Any]) -> Architecture:
    """The rules and settings that Megatron-Bridge describes for a model.

    Args:
        find_bridge: `mcore.bridge.find_bridge`.
        config: the model's configuration, completed by transformers.
        stored: the same as it stands in config.json.

    Raises:
        UserError: Megatron-Bridge is not there or does not know the family, or all at once what cannot be followed here.
    """
    seen = _Seen(config)
    bridge = find_bridge(seen)  # type: ignore[arg-type]
    name = type(bridge).__name__
    try:
        provider = bridge.provider_bridge(SimpleNamespace(config=seen))
        registry = bridge.mapping_registry()
    except (AttributeError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"Megatron-Bridge's {name} cannot read this config.json: {type(error).__name__} {error}") from error
    _refuse(name, _layer_faults(config) + _hook_faults(bridge) + _provider_faults(provider, config) + _override_faults(bridge, provider, config))
    usual = _in_usual_names(provider)
    attention = dict(bias=provider.add_qkv_bias, norm=provider.qk_layernorm)
    shared, corrected = hasattr(usual, "n_shared_experts"), provider.moe_router_enable_expert_bias
    usual_rules = partial(
        decoder_rules,
        usual,
        attention=with_attention(**attention),
        experts=partial(routed_experts, bias=corrected, shared=shared) if provider.num_moe_experts else None,
    )
    hf_names = _hf_names(name, registry, usual_rules(config.vocab_size))
    built = settings.decoder(usual, routing=_routing(provider), **attention)
    return Architecture(
        rules=lambda _, padded_vocab_size: tuple(replace(rule, hf=hf_names[rule.megatron]) for rule in usual_rules(padded_vocab_size)),
        settings=lambda _: dict(built),
        understood=frozenset(seen.fields) | _without_effect(config, stored, seen.fields),
    )


class _Seen:
    """A configuration that notes which of its fields are read."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self.fields = {"rope_parameters", "rope_scaling", "rope_theta"}  # weights/rope.py reads them

    def __getattr__(self, name: str) -> Any:
        self.fields.add(name)
        return getattr(self._config, name)


def _without_effect(config: PreTrainedConfig, stored: dict[str, Any], seen: set[str]) -> frozenset[str]:
    """Fields that the bridge did not read and need not: those that transformers has no such field for, or that leaving them out would not change."""
    kind = type(config)
    declared = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    shorter = kind.from_dict(copy.deepcopy({key: value for key, value in stored.items() if key in seen}))
    names = {key: config.attribute_map.get(key, key) for key in stored if key not in seen}
    return frozenset(key for key, name in names.items() if name not in declared or getattr(shorter, name) == getattr(config, name))


def _layer_faults(config: PreTrainedConfig) -> list[str]:
    try:
        settings.check_plain_layers(config)
    except UserError as error:
        return [str(error)]
    return []


def _hook_faults(bridge: Any) -> list[str]:
    """The conversion methods that the family overrides."""
    own = itertools.takewhile(lambda kind: kind.__name__ != "MegatronModelBridge", type(bridge).__mro__)
    return [f"its {hook}() changes weights beside the registry" for kind in own for hook in _HOOKS if hook in vars(kind)]


def _provider_faults(provider: Any, config: PreTrainedConfig) -> list[str]:
    """What the provider builds that the decoder of this package is not."""
    if type(provider).__name__ != _PROVIDER:
        return [f"it builds its model with {type(provider).__name__}, not with {_PROVIDER}"]
    faults = [f"{field}={_shown(getattr(provider, field))} (only {_shown(value)})" for field, value in _ONLY.items() if getattr(provider, field) != value]
    known = _ONLY.keys() | _FOLLOWED | _RUN
    defaults = {field.name: field.default if field.default_factory is MISSING else field.default_factory() for field in fields(provider)}
    others = {name: value for name, value in vars(provider).items() if name not in known and not (name in defaults and value == defaults[name])}
    faults += [f"{name}={_shown(value)} has no mapping" for name, value in others.items()]
    if (spec := _shown(provider.transformer_layer_spec)) not in _SPECS:
        faults.append(f"it builds its layers with {spec}")
    if provider.position_embedding_type not in ("rope", "yarn"):
        faults.append(f"position_embedding_type={provider.position_embedding_type!r}")
    if provider.moe_router_load_balancing_type not in ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"):
        faults.append(f"moe_router_load_balancing_type={provider.moe_router_load_balancing_type!r}")
    if provider.num_moe_experts and provider.moe_router_enable_expert_bias != (provider.moe_router_score_function == "sigmoid"):
        faults.append(f"moe_router_enable_expert_bias={provider.moe_router_enable_expert_bias} with {provider.moe_router_score_function} scores")
    if provider.num_moe_experts and not isinstance(provider.moe_layer_freq, int | list):
        faults.append(f"moe_layer_freq={provider.moe_layer_freq!r}")
    if (shared := provider.moe_shared_expert_intermediate_size or 0) and shared % provider.moe_ffn_hidden_size:
        faults.append(f"moe_shared_expert_intermediate_size={shared} is no multiple of moe_ffn_hidden_size={provider.moe_ffn_hidden_size}")
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    if provider.rotary_base != theta:
        faults.append(f"rope_theta={theta!r} of config.json is not followed: rotary_base={provider.rotary_base!r}")
    return faults


def _override_faults(bridge: Any, provider: Any, config: PreTrainedConfig) -> list[str]:
    """Fields of config.json that all bridges map and that this family's then sets to another value."""
    faults = []
    for name, field in bridge.CONFIG_MAPPING:
        value, followed = getattr(config, name, None), getattr(provider, field, None)
        if value is not None and field not in _RUN and value != followed:
            faults.append(f"{name}={value!r} of config.json is not followed: {field}={followed!r}")
    return faults


def _shown(value: Any) -> str:
    """A value in a message; a function by its name, with or without arguments bound."""
    named = value.func if isinstance(value, partial) else value
    return named.__name__ if hasattr(named, "__name__") else repr(value)


def _routing(provider: Any) -> settings.Routing | None:
    if not provider.num_moe_experts:
        return None
    if provider.moe_router_score_function == "sigmoid":
        return "sigmoid"
    return "softmax" if provider.moe_router_pre_softmax else "softmax_of_chosen"


def _in_usual_names(provider: Any) -> PreTrainedConfig:
    """The provider as the configuration of a family that calls everything as the tables expect."""
    heads = provider.num_attention_heads
    dense = dict(
        num_hidden_layers=provider.num_layers,
        hidden_size=provider.hidden_size,
        intermediate_size=provider.ffn_hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=provider.num_query_groups or heads,
        head_dim=provider.kv_channels or provider.hidden_size // heads,
        rms_norm_eps=provider.layernorm_epsilon,
        vocab_size=provider.vocab_size,
        tie_word_embeddings=provider.share_embeddings_and_output_weights,
    )
    if not provider.num_moe_experts:
        return PreTrainedConfig(**dense)
    every = provider.moe_layer_freq
    has_experts = every if isinstance(every, list) else [layer % every == 0 for layer in range(provider.num_layers)]
    experts = dict(
        num_local_experts=provider.num_moe_experts,
        num_experts_per_tok=provider.moe_router_topk,
        moe_intermediate_size=provider.moe_ffn_hidden_size,
        mlp_only_layers=[layer for layer, has in enumerate(has_experts) if not has],
        norm_topk_prob=True,
        n_group=provider.moe_router_num_groups,
        topk_group=provider.moe_router_group_topk,
        routed_scaling_factor=provider.moe_router_topk_scaling_factor,
    )
    if shared := provider.moe_shared_expert_intermediate_size:
        experts["n_shared_experts"] = shared // provider.moe_ffn_hidden_size
    return PreTrainedConfig(**dense, **experts)


def _hf_names(bridge: str, registry: Any, rules: tuple[Rule, ...]) -> dict[str, tuple[str, ...]]:
    """Of every parameter in `rules` the Hugging Face tensors that the registry makes it of."""
    names, faults = {}, []
    for rule in rules:
        mapping = registry.megatron_to_hf_lookup(rule.megatron) or registry.megatron_to_hf_lookup(_grouped(rule.megatron))
        fault = "there is no mapping" if mapping is None else _mapping_fault(mapping, rule)
        if fault:
            faults.append(f"{rule.megatron}: {fault}")
        else:
            parts = _PARTS[type(rule.layout)][1] if type(rule.layout) in _PARTS else ()
            names[rule.megatron] = tuple(mapping.hf_param[part] for part in parts) or (mapping.hf_param,)
    _refuse(bridge, faults)
    return names


def _grouped(name: str) -> str:
    """The name of an expert's parameter among grouped ones; any other name as it is."""
    return re.sub(r"\.local_experts\.(\d+)\.(\w+)\.weight$", r".\2.weight\1", name)


def _mapping_fault(mapping: Any, rule: Rule) -> str | None:
    """Why a mapping is not what the rule's layout does. Kinds are told by their exact class: a subclass converts in a way of its own."""
    kind = type(mapping).__name__
    if type(rule.layout) in _PARTS:
        expected = _PARTS[type(rule.layout)][0]
        return None if kind == expected else f"{kind} (only {expected})"
    if kind == "AutoMapping":
        return f"permute_dims={mapping.permute_dims}" if mapping.permute_dims is not None else None
    if kind not in _SHARDED:
        return f"{kind} has no layout here"
    return None if _SHARDED[kind] == rule.layout.dim else f"{kind}, but its shards lie along {rule.layout.dim}"


def _refuse(bridge: str, faults: list[str]) -> None:
    if faults:
        shown = faults[:20] + ([f"... and {len(faults) - 20} more"] if len(faults) > 20 else [])
        raise UserError("\n  ".join([f"Megatron-Bridge's {bridge} describes a model that cannot be built here:", *shown]))
