"""The rules that map a model's weights: which Hugging Face tensors each Megatron parameter is made of.

A rule is data. The functions here return them for the whole model under global names (layer and expert numbers count over the
whole model, whatever the parallel layout).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedConfig

from otb_megatron.weights.layout import GatedPair, GroupedQKV, InterleavedPair, PaddedVocabulary, Transposed, Whole
from otb_megatron.weights.settings import expert_layers, num_experts


class Stack(NamedTuple):
    """A place in the first dimension of Hugging Face tensors that hold something of every expert."""

    index: int
    size: int


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter or buffer and the Hugging Face tensors it is made of. The rules of a stack follow each other in the order of their places."""

    megatron: str  # global name, e.g. decoder.layers.17.mlp.linear_fc1.weight
    hf: tuple[str, ...]
    layout: Whole
    group: Literal["tensor", "expert"] = "tensor"  # the parallel group that shards it: tensor or expert-tensor
    stack: Stack | None = None  # where in the Hugging Face tensors it lies; None: it is all of them


@dataclass(frozen=True)
class Architecture:
    rules: Callable[[PreTrainedConfig, int], tuple[Rule, ...]]  # (config, padded vocabulary size)
    settings: Callable[[PreTrainedConfig], dict[str, Any]]  # TransformerConfig fields
    understood: frozenset[str]  # fields of config.json that `settings` maps or that only one value is accepted for


LayerRules = Callable[[str, str, PreTrainedConfig], list[Rule]]  # (Megatron prefix, Hugging Face prefix, config) of one layer


@dataclass(frozen=True)
class ExpertNames:
    """How a family calls the parts of a layer of experts, below the layer's prefix."""

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


USUAL_NAMES = ExpertNames()


def decoder_rules(config: PreTrainedConfig, padded_vocab_size: int, *, attention: LayerRules, experts: LayerRules | None = None) -> tuple[Rule, ...]:
    """Embedding, decoder layers, final norm and output layer.

    Args:
        attention: the rules of one layer's attention.
        experts: the rules of a layer of experts; None where every layer is dense.
    """
    vocabulary = PaddedVocabulary(vocab_size=config.vocab_size, padded_vocab_size=padded_vocab_size)
    rules = [Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)]
    for layer in range(config.num_hidden_layers):
        megatron, hf = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        rules += [
            Rule(megatron + "input_layernorm.weight", (hf + "input_layernorm.weight",), Whole()),
            Rule(megatron + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",), Whole()),
        ]
        rules += attention(megatron + "self_attention.", hf + "self_attn.", config)
        if experts is not None and expert_layers(config)[layer]:
            rules += experts(megatron + "mlp.", hf, config)
        else:
            rules += gated_mlp(megatron + "mlp.", hf + "mlp.")
    rules.append(Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Whole()))
    if not config.tie_word_embeddings:
        rules.append(Rule("output_layer.weight", ("lm_head.weight",), vocabulary))
    return tuple(rules)


def grouped_attention(
    megatron: str, hf: str, config: PreTrainedConfig, *, bias: bool, norm: bool, output_bias: bool = False, sinks: bool = False
) -> list[Rule]:
    """Grouped-query attention; `bias` of query, key and value, `norm` of query and key, `sinks`: a logit of every head that takes attention to nothing."""
    qkv = GroupedQKV(num_groups=config.num_key_value_heads, head_dim=config.head_dim)
    rules = [
        Rule(megatron + "linear_qkv.weight", tuple(f"{hf}{x}_proj.weight" for x in "qkv"), qkv),
        Rule(megatron + "linear_proj.weight", (hf + "o_proj.weight",), Whole(dim=1)),
    ]
    if bias:
        rules.append(Rule(megatron + "linear_qkv.bias", tuple(f"{hf}{x}_proj.bias" for x in "qkv"), qkv))
    if norm:
        rules += [Rule(f"{megatron}{x}_layernorm.weight", (f"{hf}{x}_norm.weight",), Whole()) for x in "qk"]
    if output_bias:
        rules.append(Rule(megatron + "linear_proj.bias", (hf + "o_proj.bias",), Whole()))
    if sinks:
        rules.append(Rule(megatron + "core_attention.softmax_offset", (hf + "sinks",), Whole(dim=0)))
    return rules


def latent_attention(megatron: str, hf: str, config: PreTrainedConfig) -> list[Rule]:
    """Multi-head latent attention. Both sides keep a head's rows as (without position, with position) and pair rotary rows alike."""
    pairs = [
        ("linear_kv_down_proj", "kv_a_proj_with_mqa", 0),
        ("kv_layernorm", "kv_a_layernorm", None),
        ("linear_kv_up_proj", "kv_b_proj", 0),
        ("linear_proj", "o_proj", 1),
    ]
    if config.q_lora_rank is None:
        pairs.append(("linear_q_proj", "q_proj", 0))
    else:
        pairs += [("linear_q_down_proj", "q_a_proj", 0), ("q_layernorm", "q_a_layernorm", None), ("linear_q_up_proj", "q_b_proj", 0)]
    return [Rule(f"{megatron}{m}.weight", (f"{hf}{h}.weight",), Whole(dim=dim)) for m, h, dim in pairs]


def gated_mlp(megatron: str, hf: str, names: tuple[str, str, str] = USUAL_NAMES.gate_up_down, group: Literal["tensor", "expert"] = "tensor") -> list[Rule]:
    """A SwiGLU layer, dense, shared or one expert."""
    gate, up, down = names
    return [
        Rule(megatron + "linear_fc1.weight", (f"{hf}{gate}.weight", f"{hf}{up}.weight"), GatedPair(), group),
        Rule(megatron + "linear_fc2.weight", (f"{hf}{down}.weight",), Whole(dim=1), group),
    ]


def routed_experts(
    megatron: str, hf: str, config: PreTrainedConfig, *, names: ExpertNames = USUAL_NAMES, bias: bool = False, shared: bool = False
) -> list[Rule]:
    """Router and experts; `bias` is the router's correction of its choice (a buffer), `shared` the expert that every token passes."""
    rules = [Rule(megatron + "router.weight", (f"{hf}{names.router}.weight",), Whole())]
    if bias:
        rules.append(Rule(megatron + "router.expert_bias", (f"{hf}{names.router}.e_score_correction_bias",), Whole()))
    if shared:
        rules += gated_mlp(megatron + "shared_experts.", hf + "mlp.shared_experts.")
    for expert in range(num_experts(config)):
        rules += gated_mlp(f"{megatron}experts.local_experts.{expert}.", f"{hf}{names.experts}.{expert}.", names.gate_up_down, "expert")
    return rules


def stacked_experts(megatron: str, hf: str, config: PreTrainedConfig) -> list[Rule]:
    """Router and experts of gpt-oss, all with biases. A tensor holds one kind of weight of all experts, [experts, inputs, outputs].

    Experts are never cut: Megatron-Core has no expert-tensor parallelism for experts with biases.
    """
    rules = [Rule(f"{megatron}router.{x}", (f"{hf}mlp.router.{x}",), Whole()) for x in ("weight", "bias")]
    parameters = [
        ("linear_fc1.weight", "gate_up_proj", InterleavedPair()),
        ("linear_fc1.bias", "gate_up_proj_bias", InterleavedPair()),
        ("linear_fc2.weight", "down_proj", Transposed()),
        ("linear_fc2.bias", "down_proj_bias", Whole()),
    ]
    for parameter, name, layout in parameters:
        for expert in range(num_experts(config)):
            own = f"{megatron}experts.local_experts.{expert}.{parameter}"
            rules.append(Rule(own, (f"{hf}mlp.experts.{name}",), layout, "expert", Stack(expert, num_experts(config))))
    return rules


def with_attention(**options: bool) -> LayerRules:
    """`grouped_attention` with its options set."""
    return partial(grouped_attention, **options)
