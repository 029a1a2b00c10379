"""A model's settings in Megatron-Core's terms: fields of TransformerConfig from a Hugging Face configuration.

A field that Megatron-Core is not told about is refused unless it has the one value that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from transformers import PreTrainedConfig

from otb_megatron.types import UserError

# How an expert's weight follows from the router's logits; the first two differ in whether the chosen ones add up to one.
Routing = Literal["softmax", "softmax_of_chosen", "sigmoid"]

# transformers builds the norms of the latents with this epsilon whatever rms_norm_eps is, vLLM with rms_norm_eps.
_LATENT_NORM_EPS = 1e-6


def no_window(config: PreTrainedConfig) -> dict[str, Any]:
    """Full attention in every layer. transformers ignores a window in these families, and vLLM may not."""
    _only(config, use_sliding_window=False, sliding_window=None)
    return _windows(config, [False] * config.num_hidden_layers)


def one_window(config: PreTrainedConfig) -> dict[str, Any]:
    """`sliding_window` in every layer, or null. transformers does not look at layer_types in these families, vLLM does."""
    if config.sliding_window is not None and getattr(config, "use_sliding_window", True) is False:
        raise UserError(f"config.json: use_sliding_window=False with sliding_window={config.sliding_window} contradict each other for {config.model_type}")
    return _windows(config, [config.sliding_window is not None] * config.num_hidden_layers)


def windows_by_layer(config: PreTrainedConfig) -> dict[str, Any]:
    """`sliding_window` in the layers that `layer_types` calls sliding_attention; transformers derives those where config.json has none."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    if any(slides) and config.sliding_window is None:
        raise UserError("config.json: layer_types holds sliding_attention, but sliding_window or use_sliding_window turns the window off")
    if 0 < sum(slides) < len(slides) and getattr(config, "max_window_layers", None) == len(slides):
        raise UserError(
            f"config.json: max_window_layers={len(slides)} with sliding_attention in layer_types: vLLM then leaves the window out; give the layer "
            "from which on the window holds"
        )
    return _windows(config, slides)


def _windows(config: PreTrainedConfig, slides: list[bool]) -> dict[str, Any]:
    """Which layers have a window. Megatron-Core counts the tokens before a token, transformers that token as well."""
    kinds = ["sliding_attention" if layer_slides else "full_attention" for layer_slides in slides]
    if (getattr(config, "layer_types", None) or kinds) != kinds:
        raise UserError(f"config.json: layer_types {config.layer_types} has no mapping for {config.model_type} here; only {kinds}")
    if not any(slides):
        return {}
    if config.sliding_window < 1:
        raise UserError(f"config.json: sliding_window={config.sliding_window} hides a token from itself; null turns the window off")
    return dict(window_size=(config.sliding_window - 1, 0), window_attn_skip_freq=[int(layer_slides) for layer_slides in slides])


def dense(
    config: PreTrainedConfig, *, norm: bool = False, bias: bool = False, windows: Callable[[PreTrainedConfig], dict[str, Any]] = no_window
) -> dict[str, Any]:
    """A pre-norm decoder with grouped-query attention, RMSNorm, RoPE and SwiGLU; `norm` of query and key, `bias` of query, key and value."""
    _check_swiglu(config)
    if not bias:
        _only(config, attention_bias=False)
    return windows(config) | dict(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=norm,
        add_qkv_bias=bias,
    )


def check_plain_layers(config: PreTrainedConfig) -> None:
    """Refuses layers other than those of SwiGLU and of attention to all earlier positions."""
    _check_swiglu(config)
    no_window(config)


def _check_swiglu(config: PreTrainedConfig) -> None:
    _only(config, hidden_act="silu", attention_dropout=0.0, mlp_bias=False, use_mrope=False)


def qwen3_moe(config: PreTrainedConfig) -> dict[str, Any]:
    routing = _softmax_routing(normalised=config.norm_topk_prob)
    return dense(config, norm=True, windows=one_window) | _experts(config, config.moe_intermediate_size) | routing


def mixtral(config: PreTrainedConfig) -> dict[str, Any]:
    _only(config, router_jitter_noise=0.0)
    return dense(config, windows=one_window) | _experts(config, config.intermediate_size) | _softmax_routing(normalised=True)


def glm4_moe(config: PreTrainedConfig) -> dict[str, Any]:
    return dense(config, norm=config.use_qk_norm, bias=config.attention_bias) | _experts(config, config.moe_intermediate_size) | _sigmoid_routing(config)


def deepseek_v3(config: PreTrainedConfig) -> dict[str, Any]:
    _only(config, rope_interleave=True, moe_layer_freq=1)
    # transformers does not look at these two, and vLLM takes the routing of DeepSeek-V2 for granted where they are missing.
    for field, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if getattr(config, field, None) != value:
            raise UserError(f"config.json: {field}={getattr(config, field, None)!r}, but deepseek_v3 is {value!r}; write it there, since vLLM reads it")
    return _latent(config) | _experts(config, config.moe_intermediate_size) | _sigmoid_routing(config)


def deepseek_v2(config: PreTrainedConfig) -> dict[str, Any]:
    # transformers does not look at norm_topk_prob, vLLM does.
    _only(config, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1)
    if config.topk_method not in ("greedy", "group_limited_greedy"):
        raise UserError(f"config.json: topk_method={config.topk_method!r} has no mapping; only greedy and group_limited_greedy")
    groups = _groups(config)
    if groups and config.topk_method == "greedy":
        fields = f"n_group={config.n_group} and topk_group={config.topk_group}"
        raise UserError(f"config.json: topk_method='greedy' with {fields}: transformers takes no groups then, vLLM does; set n_group=1 and topk_group=1")
    routing = _softmax_routing(normalised=False) | groups | dict(moe_router_topk_scaling_factor=config.routed_scaling_factor)
    return _latent(config) | _experts(config, config.moe_intermediate_size) | routing


def gpt_oss(config: PreTrainedConfig) -> dict[str, Any]:
    # vLLM takes these for granted, whatever config.json says.
    _only(config, hidden_act="silu", attention_bias=True, rms_norm_eps=1e-5, swiglu_alpha=1.702, swiglu_limit=7.0, tie_word_embeddings=False)
    alternating = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    if config.sliding_window is None or config.layer_types != alternating[: config.num_hidden_layers]:
        given = f"layer_types={config.layer_types} with sliding_window={config.sliding_window}"
        raise UserError(f"config.json: {given} has no mapping: vLLM has a window in the first layer and every second one after it, whatever layer_types says")
    rope = {key: value for key, value in config.rope_parameters.items() if value is not None}
    if rope["rope_type"] != "yarn" or not {"beta_fast", "beta_slow"} <= rope.keys() or {"attention_factor", "mscale", "mscale_all_dim"} & rope.keys():
        raise UserError(f"config.json: rope_parameters {rope} has no mapping: vLLM takes yarn with beta_fast, beta_slow and its usual attention factor")
    # Older names of two fields, which nobody reads.
    _only(config, experts_per_token=config.num_experts_per_tok, initial_context_length=rope.get("original_max_position_embeddings"))
    own = dict(
        add_bias_linear=True,
        softmax_type="learnable",
        activation_func="quick_gelu",
        glu_linear_offset=1.0,
        activation_func_clamp_value=config.swiglu_limit,
    )
    attention = dense(config, bias=True, windows=windows_by_layer)
    return attention | _experts(config, config.intermediate_size) | _softmax_routing(normalised=True) | own


def decoder(config: PreTrainedConfig, *, norm: bool, bias: bool, routing: Routing | None) -> dict[str, Any]:
    """A family by its parts, for one without a function of its own; `routing` is None for a dense model."""
    settings = dense(config, norm=norm, bias=bias)
    if routing is None:
        return settings
    settings |= _experts(config, config.moe_intermediate_size)
    if routing == "sigmoid":
        return settings | _sigmoid_routing(config)
    scaled = {} if config.routed_scaling_factor is None else dict(moe_router_topk_scaling_factor=config.routed_scaling_factor)
    return settings | _softmax_routing(normalised=routing == "softmax_of_chosen") | _groups(config) | scaled


def expert_layers(config: PreTrainedConfig) -> list[bool]:
    """For each layer, whether it holds experts. The families say it in different fields; a field that one lacks excludes no layer."""
    first, step = getattr(config, "first_k_dense_replace", 0), getattr(config, "decoder_sparse_step", 1)
    dense_layers = getattr(config, "mlp_only_layers", None) or []
    return [layer >= first and (layer + 1) % step == 0 and layer not in dense_layers for layer in range(config.num_hidden_layers)]


def num_experts(config: PreTrainedConfig) -> int:
    return config.n_routed_experts if hasattr(config, "n_routed_experts") else config.num_local_experts


def _latent(config: PreTrainedConfig) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The scale of the softmax grows with YaRN's factor by `mscale_all_dim`."""
    _only(config, rms_norm_eps=_LATENT_NORM_EPS)
    nope, rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
    # The first two are derived; transformers takes them from config.json if they stand there.
    derived = dict(head_dim=rotary, qk_head_dim=nope + rotary, num_key_value_heads=config.num_attention_heads)
    wrong = [f"{name}={getattr(config, name)}, which must be {value}" for name, value in derived.items() if getattr(config, name) != value]
    if wrong:
        given = f"qk_nope_head_dim={nope}, qk_rope_head_dim={rotary} and num_attention_heads={config.num_attention_heads}"
        raise UserError(f"config.json: {', '.join(wrong)}, does not follow from {given}; leave it out")
    kind = config.rope_parameters["rope_type"]
    if kind in ("linear", "llama3"):
        raise UserError(f"config.json: rope_type {kind!r} in rope_parameters has no mapping for {config.model_type}: vLLM takes it for yarn")
    rope = config.rope_parameters if kind == "yarn" else {}
    return dense(config, norm=True) | dict(
        multi_latent_attention=True,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_head_dim=nope,
        qk_pos_emb_head_dim=rotary,
        v_head_dim=config.v_head_dim,
        rope_type="yarn",
        rotary_scaling_factor=rope.get("factor") or 1.0,
        mscale_all_dim=rope.get("mscale_all_dim") or 0.0,
    )


def _experts(config: PreTrainedConfig, intermediate_size: int) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        num_moe_experts=num_experts(config),
        moe_router_topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=intermediate_size,
        moe_layer_freq=[int(holds_experts) for holds_experts in expert_layers(config)],
    )
    if hasattr(config, "n_shared_experts"):
        if not config.n_shared_experts:
            raise UserError(f"config.json: n_shared_experts={config.n_shared_experts!r} has no mapping; only 1 or more")
        settings["moe_shared_expert_intermediate_size"] = intermediate_size * config.n_shared_experts
    return settings


def _softmax_routing(*, normalised: bool) -> dict[str, Any]:
    """`normalised`: the weights of the chosen experts add up to one; the softmax over the chosen logits is that of all, renormalised."""
    return dict(moe_router_score_function="softmax", moe_router_pre_softmax=not normalised)


def _sigmoid_routing(config: PreTrainedConfig) -> dict[str, Any]:
    """Sigmoid scores, a choice corrected by a bias for each expert, groups of experts, weights that add up to `routed_scaling_factor` (arXiv 2412.19437)."""
    _only(config, norm_topk_prob=True)
    if config.num_experts_per_tok == 1:
        raise UserError("config.json: num_experts_per_tok=1 with norm_topk_prob has no mapping: Megatron-Core does not normalise the weight of a single expert")
    groups = _groups(config)
    if groups and (scored := config.num_experts_per_tok // config.topk_group) != 2:
        fields = f"num_experts_per_tok={config.num_experts_per_tok} with topk_group={config.topk_group} of n_group={config.n_group}"
        raise UserError(f"config.json: {fields} has no mapping: Megatron-Core scores a group by its best {scored} experts, {config.model_type} by its best 2")
    return groups | dict(
        moe_router_score_function="sigmoid",
        moe_router_pre_softmax=False,
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=config.routed_scaling_factor,
    )


def _groups(config: PreTrainedConfig) -> dict[str, Any]:
    """Experts are chosen from the best `topk_group` of `n_group` groups of experts."""
    if config.n_group in (None, 1) or config.topk_group == config.n_group:
        return {}
    available = config.topk_group * num_experts(config) // config.n_group
    if config.num_experts_per_tok > available:
        raise UserError(
            f"config.json: num_experts_per_tok={config.num_experts_per_tok}, but topk_group={config.topk_group} of n_group={config.n_group} hold {available}"
        )
    return dict(moe_router_num_groups=config.n_group, moe_router_group_topk=config.topk_group)


def _only(config: PreTrainedConfig, **accepted: Any) -> None:
    """Refuses a field that has another value than the one accepted; null counts as false, zero or null."""
    values = {key: getattr(config, key, value) for key, value in accepted.items()}
    wrong = [f"{key}={value!r} (only {accepted[key]!r})" for key, value in values.items() if value != accepted[key] and (value is not None or accepted[key])]
    if wrong:
        raise UserError(f"config.json: {', '.join(wrong)} has no mapping to Megatron-Core here")
