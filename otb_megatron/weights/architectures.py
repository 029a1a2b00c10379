"""Per architecture: the rules that map its weights, its settings in Megatron-Core's terms, and the fields of config.json that they cover."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from otb_megatron.types import UserError
from otb_megatron.weights import bridge, settings
from otb_megatron.weights.files import read_object
from otb_megatron.weights.layout import Whole
from otb_megatron.weights.rope import Rope, rope
from otb_megatron.weights.rules import Architecture, ExpertNames, Rule, decoder_rules, latent_attention, routed_experts, stacked_experts, with_attention

_VALUE_HEAD = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}  # [1, hidden] and [1]
VALUE_HEAD = frozenset(_VALUE_HEAD.values())  # what a checkpoint may lack and still start a critic


@dataclass(frozen=True)
class HuggingFaceModel:
    """A model directory's configuration, with what it leaves out filled in as transformers does, and its architecture."""

    path: Path
    config: PreTrainedConfig
    architecture: Architecture

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @property
    def is_moe(self) -> bool:
        return "num_moe_experts" in self.settings

    @property
    def settings(self) -> dict[str, Any]:
        """TransformerConfig fields. Raises UserError for a setting without a mapping."""
        return self.architecture.settings(self.config)

    @property
    def rope(self) -> Rope:
        return rope(self.config)

    @property
    def identity(self) -> dict[str, Any]:
        """What of config.json decides which weights there are and what they compute: all but the fields without effect. JSON values."""
        fields = json.loads(self.config.to_json_string(use_diff=False))
        return {key: value for key, value in fields.items() if key == "model_type" or key in self.architecture.understood}

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

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor of a checkpoint has no part in training: a stored table, the second copy of tied weights, layers that draft further tokens."""
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight"):
            return True
        drafting = range(self.config.num_hidden_layers, self.config.num_hidden_layers + (getattr(self.config, "num_nextn_predict_layers", None) or 0))
        return name.startswith(tuple(f"model.layers.{layer}." for layer in drafting))


def load_model(path: Path, setting: str = "model.path", find_bridge: bridge.FindBridge | None = None) -> HuggingFaceModel:
    """Reads `path`/config.json and finds its architecture.

    Args:
        setting: the configuration's key that `path` comes from.
        find_bridge: where families without a table are looked up (`mcore.bridge.find_bridge`); None for nowhere.

    Raises:
        UserError: no such directory, no config.json, or an architecture or setting without a mapping here.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{setting}={path}: no config.json there; give a Hugging Face model directory")
    stored = read_object(file, "download the model again")
    _check_sizes(file, stored)
    model_type = stored.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(_no_table(file, model_type))
    if model_type in ARCHITECTURES:
        architecture = ARCHITECTURES[model_type]
        _check_fields(file, stored, architecture)
        config = _completed(file, stored)
    elif find_bridge is not None and model_type in CONFIG_MAPPING:
        config = _completed(file, stored)
        try:
            architecture = bridge.architecture(find_bridge, config, stored)
        except UserError as error:
            raise UserError(f"{_no_table(file, model_type)}; {error}") from error
        _check_fields(file, stored, architecture)
    else:
        raise UserError(_no_table(file, model_type))
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    model = HuggingFaceModel(path, config, architecture)
    _ = model.settings, model.rope  # so that what has no mapping is said here
    return model


def _no_table(file: Path, model_type: object) -> str:
    return f"{file}: model_type {model_type!r} has no weight mapping; known: {', '.join(sorted(ARCHITECTURES))}"


def _check_sizes(file: Path, stored: dict[str, Any]) -> None:
    """Refuses counts of nothing, which everybody divides by. That they are whole numbers, transformers checks."""
    given = {name: stored[name] for name in _AT_LEAST_ONE if isinstance(stored.get(name), int | float)}
    if wrong := [f"{name}={value!r}" for name, value in given.items() if not value >= 1]:
        raise UserError(f"{file}: {', '.join(wrong)} must be at least 1; download the model again")


def _check_fields(file: Path, stored: dict[str, Any], architecture: Architecture) -> None:
    """Refuses fields of config.json that nobody maps."""
    if quantization := stored.get("quantization_config"):
        raise UserError(
            f"{file}: quantization_config={quantization!r}, and only weights that are not quantized are read; write them in bfloat16 first"
            + (_MXFP4_REMEDY if stored["model_type"] == "gpt_oss" else "")
        )
    unknown = sorted(set(stored) - architecture.understood - _NO_EFFECT)
    if unknown:
        listed = ", ".join(f"{key}={stored[key]!r}" for key in unknown)
        raise UserError(f"{file}: no mapping to Megatron-Core for {listed}; ignoring it could train another model")


def _completed(file: Path, stored: dict[str, Any]) -> PreTrainedConfig:
    """The configuration with what config.json leaves out filled in as transformers does."""
    try:
        return CONFIG_MAPPING[stored["model_type"]].from_dict(stored)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:  # what its checks of types and values end in
        raise UserError(f"{file}: transformers refuses it: {error}") from error


_AT_LEAST_ONE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim decoder_sparse_step n_group topk_group".split()
)  # or null, where transformers has a default

# By default save_pretrained of transformers 5.19 writes the experts of all layers under one name.
_MXFP4_REMEDY = (
    ", with transformers: from_pretrained(..., dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)), then "
    "save_pretrained(..., save_original_format=False)"
)

# Bookkeeping of transformers and settings of generation and of auxiliary losses: they do not enter a training forward pass.
_NO_EFFECT = frozenset(
    "architectures auto_map aux_loss_alpha bos_token_id chunk_size_feed_forward dtype eos_token_id ep_size id2label initializer_range is_encoder_decoder "
    "label2id max_window_layers max_position_embeddings model_type num_nextn_predict_layers output_attentions output_hidden_states output_router_logits "
    "pad_token_id pretraining_tp problem_type return_dict router_aux_loss_coef seq_aux torch_dtype transformers_version unk_token_id use_cache "
    "_name_or_path name_or_path _model_name_or_path".split()
)
_DENSE_FIELDS = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_parameters "
    "rope_scaling rope_theta tie_word_embeddings attention_bias attention_dropout mlp_bias use_sliding_window sliding_window use_mrope layer_types "
    "partial_rotary_factor".split()
)
_QWEN_MOE_FIELDS = _DENSE_FIELDS | frozenset(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers".split()
)
_MIXTRAL_FIELDS = _DENSE_FIELDS | frozenset("num_local_experts num_experts_per_tok router_jitter_noise".split())
_SHARED_EXPERT_FIELDS = _DENSE_FIELDS | frozenset(
    "n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group norm_topk_prob "
    "routed_scaling_factor".split()
)
_GPT_OSS_FIELDS = _DENSE_FIELDS | frozenset("num_local_experts num_experts_per_tok experts_per_token initial_context_length swiglu_alpha swiglu_limit".split())
_LATENT_FIELDS = _SHARED_EXPERT_FIELDS | frozenset(
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim rope_interleave scoring_func topk_method moe_layer_freq".split()
)


def _glm_rules(config: PreTrainedConfig, padded_vocab_size: int) -> tuple[Rule, ...]:
    attention = with_attention(bias=config.attention_bias, norm=config.use_qk_norm)
    return decoder_rules(config, padded_vocab_size, attention=attention, experts=partial(routed_experts, bias=True, shared=True))


_PLAIN, _BIASED, _NORMED = (with_attention(bias=bias, norm=norm) for bias, norm in ((False, False), (True, False), (False, True)))
_MIXTRAL_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(partial(decoder_rules, attention=_PLAIN), settings.dense, _DENSE_FIELDS),
    "mistral": Architecture(partial(decoder_rules, attention=_PLAIN), partial(settings.dense, windows=settings.one_window), _DENSE_FIELDS),
    "qwen2": Architecture(partial(decoder_rules, attention=_BIASED), partial(settings.dense, bias=True, windows=settings.windows_by_layer), _DENSE_FIELDS),
    "qwen3": Architecture(partial(decoder_rules, attention=_NORMED), partial(settings.dense, norm=True, windows=settings.windows_by_layer), _DENSE_FIELDS),
    "qwen3_moe": Architecture(partial(decoder_rules, attention=_NORMED, experts=routed_experts), settings.qwen3_moe, _QWEN_MOE_FIELDS),
    "mixtral": Architecture(partial(decoder_rules, attention=_PLAIN, experts=partial(routed_experts, names=_MIXTRAL_NAMES)), settings.mixtral, _MIXTRAL_FIELDS),
    "gpt_oss": Architecture(
        partial(decoder_rules, attention=with_attention(bias=True, norm=False, output_bias=True, sinks=True), experts=stacked_experts),
        settings.gpt_oss,
        _GPT_OSS_FIELDS,
    ),
    "glm4_moe": Architecture(_glm_rules, settings.glm4_moe, _SHARED_EXPERT_FIELDS | {"use_qk_norm"}),
    "deepseek_v2": Architecture(
        partial(decoder_rules, attention=latent_attention, experts=partial(routed_experts, shared=True)), settings.deepseek_v2, _LATENT_FIELDS
    ),
    "deepseek_v3": Architecture(
        partial(decoder_rules, attention=latent_attention, experts=partial(routed_experts, shared=True, bias=True)), settings.deepseek_v3, _LATENT_FIELDS
    ),
}
