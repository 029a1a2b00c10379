"""Per architecture: the rules that map its weights, and its settings in Megatron-Core's terms.

A rule is data. `rules(hf_config, padded_vocab_size)` returns one immutable tuple for the whole model under global names
(layer and expert numbers count over the whole model, whatever the parallel layout).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from otb_megatron.types import UserError
from otb_megatron.weights.layout import GatedPair, GroupedQKV, PaddedVocabulary, Whole

_VALUE_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}  # [1, hidden] and [1]
VALUE_HEAD = frozenset(_VALUE_HEAD.values())  # what a checkpoint may lack and still start a critic


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    megatron: str  # global name, e.g. decoder.layers.17.mlp.linear_fc1.weight
    hf: tuple[str, ...]
    layout: Whole
    group: Literal["tensor", "expert"] = "tensor"  # the parallel group that shards it: tensor or expert-tensor


@dataclass(frozen=True)
class Architecture:
    rules: Callable[[dict[str, Any], int], tuple[Rule, ...]]
    settings: Callable[[dict[str, Any]], dict[str, Any]]  # TransformerConfig fields
    understood: frozenset[str]  # fields of config.json that `settings` maps or that only one value is accepted for


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model directory's config.json with its architecture."""

    path: Path
    config: dict[str, Any]
    architecture: Architecture

    @property
    def vocab_size(self) -> int:
        return self.config["vocab_size"]

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def is_moe(self) -> bool:
        return "num_moe_experts" in self.architecture.settings(self.config)

    def padded_vocab_size(self, tensor_model_parallel_size: int, divisible_by: int) -> int:
        """The vocabulary size rounded up so that every tensor-parallel rank holds the same multiple of `divisible_by` rows."""
        multiple = tensor_model_parallel_size * divisible_by
        return -(-self.vocab_size // multiple) * multiple

    def rules(self, padded_vocab_size: int) -> tuple[Rule, ...]:
        return self.architecture.rules(self.config, padded_vocab_size)

    def critic_rules(self, padded_vocab_size: int) -> tuple[Rule, ...]:
        """Those of a token classifier with one label, as transformers stores it: the same decoder with `score` in the place of the output layer."""
        decoder = [rule for rule in self.rules(padded_vocab_size) if rule.megatron != "output_layer.weight"]
        return (*decoder, *(Rule(megatron, (hf,), Whole()) for megatron, hf in _VALUE_HEAD.items()))


def load_model(path: Path, setting: str = "model.path") -> HuggingFaceModel:
    """Reads `path`/config.json and finds its architecture. `setting` names the configuration's key that `path` comes from.

    Raises:
        UserError: no such directory, no config.json, or an architecture or setting without a mapping here.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{setting}={path}: no config.json there; give a Hugging Face model directory")
    config = json.loads(file.read_text())
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise UserError(f"{file}: model_type {model_type!r} has no weight mapping; known: {', '.join(sorted(ARCHITECTURES))}")
    architecture = ARCHITECTURES[model_type]
    unknown = sorted(set(config) - architecture.understood - _NO_EFFECT)
    if unknown:
        listed = ", ".join(f"{key}={config[key]!r}" for key in unknown)
        raise UserError(f"{file}: no mapping to Megatron-Core for {listed}; ignoring it could train another model")
    return HuggingFaceModel(path, config, architecture)


def _decoder_rules(config: dict[str, Any], padded_vocab_size: int, *, qk_norm: bool, mlp: Callable[[str, str, dict[str, Any]], list[Rule]]) -> tuple[Rule, ...]:
    """Embedding, decoder layers with grouped-query attention, final norm and output layer."""
    vocabulary = PaddedVocabulary(vocab_size=config["vocab_size"], padded_vocab_size=padded_vocab_size)
    qkv = GroupedQKV(num_groups=config["num_key_value_heads"], head_dim=_head_dim(config))
    rules = [Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)]
    for layer in range(config["num_hidden_layers"]):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += [
            Rule(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), Whole()),
            Rule(megatron + "self_attention.linear_qkv.weight", tuple(f"{hf}self_attn.{x}_proj.weight" for x in "qkv"), qkv),
            Rule(megatron + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",), Whole(dim=1)),
            Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), Whole()),
        ]
        if _qkv_bias(config):
            rules.append(Rule(megatron + "self_attention.linear_qkv.bias", tuple(f"{hf}self_attn.{x}_proj.bias" for x in "qkv"), qkv))
        if qk_norm:
            rules += [Rule(f"{megatron}self_attention.{x}_layernorm.weight", (f"{hf}self_attn.{x}_norm.weight",), Whole()) for x in "qk"]
        rules += mlp(megatron, hf, config)
    rules.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Whole()))
    if not config.get("tie_word_embeddings", False):
        rules.append(Rule("output_layer.weight", ("lm_head.weight",), vocabulary))
    return tuple(rules)


def _dense_mlp(megatron: str, hf: str, config: dict[str, Any]) -> list[Rule]:
    return [
        Rule(megatron + "mlp.linear_fc1.weight", (hf + "mlp.gate_proj.weight", hf + "mlp.up_proj.weight"), GatedPair()),
        Rule(megatron + "mlp.linear_fc2.weight", (hf + "mlp.down_proj.weight",), Whole(dim=1)),
    ]


def _moe_mlp(megatron: str, hf: str, config: dict[str, Any]) -> list[Rule]:
    rules = [Rule(megatron + "mlp.router.weight", (hf + "mlp.gate.weight",), Whole())]
    for expert in range(_num_experts(config)):
        m, h = f"{megatron}mlp.experts.local_experts.{expert}.", f"{hf}mlp.experts.{expert}."
        rules += [
            Rule(m + "linear_fc1.weight", (h + "gate_proj.weight", h + "up_proj.weight"), GatedPair(), "expert"),
            Rule(m + "linear_fc2.weight", (h + "down_proj.weight",), Whole(dim=1), "expert"),
        ]
    return rules


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _num_experts(config: dict[str, Any]) -> int:
    """transformers 5 writes Qwen3-MoE's `num_experts` as `num_local_experts`."""
    return config["num_experts"] if "num_experts" in config else config["num_local_experts"]


def _qkv_bias(config: dict[str, Any]) -> bool:
    return config["model_type"] == "qwen2"


def _settings(config: dict[str, Any], *, qk_norm: bool = False) -> dict[str, Any]:
    """TransformerConfig fields of a pre-norm decoder with RMSNorm, RoPE and SwiGLU; plus `rotary_base`."""
    _only(config, hidden_act="silu", attention_dropout=0.0, attention_bias=False, mlp_bias=False)
    _only(config, use_sliding_window=False, use_mrope=False, partial_rotary_factor=1.0)
    if config.get("use_sliding_window", True):  # Qwen2 keeps a window size in its configuration and turns it off beside it
        _only(config, sliding_window=None)
    if set(config.get("layer_types") or ["full_attention"]) != {"full_attention"}:
        raise UserError(f"config.json: layer_types {sorted(set(config['layer_types']))} has no mapping; only full_attention")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default" or set(rope) - {"rope_type", "type", "rope_theta"}:
        raise UserError(f"config.json: RoPE scaling {rope} has no mapping yet; only rope_type=default with rope_theta")
    return dict(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=_head_dim(config),
        layernorm_epsilon=config["rms_norm_eps"],
        qk_layernorm=qk_norm,
        add_qkv_bias=_qkv_bias(config),
        rotary_base=rope.get("rope_theta", config.get("rope_theta", 10000.0)),
    )


def _moe_settings(config: dict[str, Any]) -> dict[str, Any]:
    _only(config, decoder_sparse_step=1, mlp_only_layers=[])
    return _settings(config, qk_norm=True) | dict(
        num_moe_experts=_num_experts(config),
        moe_router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        moe_router_score_function="softmax",
        moe_router_pre_softmax=not config["norm_topk_prob"],  # softmax over the chosen logits equals the renormalised softmax over all
    )


def _only(config: dict[str, Any], **accepted: Any) -> None:
    """Refuses a field that Megatron-Core is not told about unless it has the one value that changes nothing."""
    wrong = [f"{key}={config[key]!r} (only {value!r})" for key, value in accepted.items() if config.get(key, value) not in (value, None)]
    if wrong:
        raise UserError(f"config.json: {', '.join(wrong)} has no mapping to Megatron-Core here")


# Bookkeeping of transformers and settings of generation: they do not enter a training forward pass.
_NO_EFFECT = frozenset(
    "architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id id2label initializer_range is_encoder_decoder label2id max_window_layers "
    "max_position_embeddings model_type output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp problem_type "
    "return_dict router_aux_loss_coef torch_dtype transformers_version use_cache _name_or_path name_or_path".split()
)
_DENSE_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_parameters "
    "rope_scaling rope_theta tie_word_embeddings attention_bias attention_dropout mlp_bias use_sliding_window sliding_window use_mrope layer_types "
    "partial_rotary_factor".split()
)
_MOE_FIELDS = _DENSE_FIELDS | frozenset(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers".split()
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(lambda c, v: _decoder_rules(c, v, qk_norm=False, mlp=_dense_mlp), _settings, _DENSE_FIELDS),
    "qwen2": Architecture(lambda c, v: _decoder_rules(c, v, qk_norm=False, mlp=_dense_mlp), _settings, _DENSE_FIELDS),
    "qwen3": Architecture(lambda c, v: _decoder_rules(c, v, qk_norm=True, mlp=_dense_mlp), lambda c: _settings(c, qk_norm=True), _DENSE_FIELDS),
    "qwen3_moe": Architecture(lambda c, v: _decoder_rules(c, v, qk_norm=True, mlp=_moe_mlp), _moe_settings, _MOE_FIELDS),
}
