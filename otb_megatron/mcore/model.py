"""A Hugging Face model as Megatron-Core's GPTModel, cut over the parallel groups."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from otb_megatron.config import Config
from otb_megatron.mcore.attention import PackedDotProductAttention, PackedRotaryEmbedding
from otb_megatron.mcore.few_rows import give_enough_rows
from otb_megatron.mcore.head import ValueLayer
from otb_megatron.mcore.latent_attention import LatentRotaryEmbedding, LatentSelfAttention
from otb_megatron.mcore.norm import RMSNorm
from otb_megatron.mcore.parallel import Parallel
from otb_megatron.mcore.platform import uses_transformer_engine
from otb_megatron.mcore.router import ranks_groups_by_best, refused_settings, use_packed_router
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.rules import Rule

_ANOTHER_MODEL = "makes another model than the config.json that the engines sample from"
_NEIGHBOURS = "lets the result of a token depend on what else is in its microbatch, or on chance"
_OTHER_STEP = "needs another training step, schedule or set of process groups than this one"
# What Megatron-Core accepts and then computes wrongly or differently here, by the reason. A field at its default is nothing to refuse.
_REFUSED = {
    **dict.fromkeys(
        """softmax_scale softmax_type window_size window_attn_skip_freq multi_latent_attention experimental_attention_variant linear_attention_freq
        attention_output_gate qk_l2_norm qk_clip no_rope_freq rotary_interleaved mrope_section layernorm_zero_centered_gamma
        apply_residual_connection_post_layernorm glu_linear_offset activation_func_clamp_value use_mup mtp_num_layers moe_latent_size
        moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_apply_probs_on_input moe_router_topk_limited_devices
        moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_score_function moe_router_pre_softmax
        moe_router_enable_expert_bias heterogeneous_block_specs is_hybrid_model""".split(),
        _ANOTHER_MODEL,
    ),
    **dict.fromkeys(
        ("moe_expert_rank_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_dropping"),
        _NEIGHBOURS,
    ),
    **dict.fromkeys(
        """num_microbatches_with_partial_activation_checkpoints delay_wgrad_compute defer_embedding_wgrad_compute
        hybrid_context_parallel max_seqlen_per_dp_cp_rank hierarchical_context_parallel_sizes microbatch_group_size_per_vp_stage
        tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards gtp_weight_remat_size expert_gtp_weight_remat_size
        pipeline_model_parallel_comm_backend use_ring_exchange_p2p cuda_graph_impl enable_cuda_graph external_cuda_graph""".split(),
        _OTHER_STEP,
    ),
}


_ACTIVATIONS = {"silu": F.silu, "quick_gelu": quick_gelu}  # this quick_gelu: Megatron-Core compares functions, and has another one of the same name


@dataclass(frozen=True)
class Model:
    """This rank's part of a policy, or of a critic."""

    hf: HuggingFaceModel
    config: TransformerConfig
    padded_vocab_size: int
    chunks: list[GPTModel]  # one per virtual pipeline stage
    parallel: Parallel
    is_critic: bool  # a ValueLayer stands in the place of the output layer

    @property
    def rules(self) -> tuple[Rule, ...]:
        """How its weights correspond to Hugging Face tensors."""
        return self.hf.critic_rules(self.padded_vocab_size) if self.is_critic else self.hf.rules(self.padded_vocab_size)

    @property
    def ties_output(self) -> bool:
        """Whether the embedding is the output layer's weight too. A critic has no output over the vocabulary."""
        return self.hf.tied and not self.is_critic

    def wrapped_chunks(self) -> list[torch.nn.Module]:
        """The chunks as the optimizer wants them: bfloat16 models convert at the pipeline's ends."""
        return [Float16Module(self.config, chunk) for chunk in self.chunks] if self.config.bf16 else list(self.chunks)


def transformer_config(config: Config, hf: HuggingFaceModel) -> TransformerConfig:
    """Megatron-Core's configuration of the model.

    Raises:
        UserError: a `megatron:` key that does not exist or is not the user's to set, a combination Megatron-Core refuses, or one that it
            accepts and computes wrongly.
    """
    settings = _settings(config, hf)
    _check_megatron_section(config, settings)
    kind = MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig
    try:
        # Upstream refuses `allgather` where packs differ in length. Ours differ, but with `allgather` the ones that meet do not.
        built = kind(**settings | _choices(settings) | config.megatron | dict(variable_seq_lengths=False))
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"Megatron-Core refuses the configuration: {error}") from error
    built.variable_seq_lengths = settings["variable_seq_lengths"]
    if built.virtual_pipeline_model_parallel_size != config.parallel.virtual_pipeline_model_parallel_size:
        # Megatron-Core counts the stages of the layout itself, and would then run the ones that nobody built.
        raise UserError(
            f"megatron.pipeline_model_parallel_layout has {built.virtual_pipeline_model_parallel_size} virtual stages a rank; set "
            f"parallel.virtual_pipeline_model_parallel_size={built.virtual_pipeline_model_parallel_size}"
        )
    # SelfAttention multiplies cosine and sine by m(s, mscale) / m(s, mscale_all_dim) with m(s, x) = 0.1 x ln(s) + 1, if these three are there.
    built.yarn_rotary_scaling_factor, built.yarn_mscale, built.yarn_mscale_all_dim = math.exp(10), hf.rope.attention_factor - 1, 0.0  # type: ignore[attr-defined]
    return built


def _settings(config: Config, hf: HuggingFaceModel) -> dict[str, Any]:
    """TransformerConfig fields that follow from the model, the other sections or the training step; `megatron:` may not set them."""
    parallel, dtype = config.parallel, getattr(torch, config.model.dtype)
    settings: dict[str, Any] = dict(activation_func="silu", add_bias_linear=False) | hf.settings
    settings["activation_func"] = _ACTIVATIONS[settings["activation_func"]]
    if "multi_latent_attention" in settings or hf.rope.attention_factor != 1.0:
        settings["apply_rope_fusion"] = False  # the fused rotation of packed sequences knows no factor
    settings |= dict(
        normalization="RMSNorm",
        gated_linear_unit=True,
        attention_dropout=0.0,  # the ratio of two policies needs the same network twice
        hidden_dropout=0.0,
        **{name: getattr(parallel, name) for name in type(parallel).model_fields},
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=False,
        perform_initialization=False,  # weights are loaded from model.path
        calculate_per_token_loss=True,  # the step divides by global token counts
        variable_seq_lengths=True,  # packs differ in length
    )
    if parallel.virtual_pipeline_model_parallel_size:
        # Without overlap, interleaved stages exchange two messages between one pair of ranks and mix them up: silently wrong gradients.
        settings |= dict(overlap_p2p_comm=True, batch_p2p_comm=False)
    return settings


def _choices(settings: dict[str, Any]) -> dict[str, Any]:
    """Fields with a default of ours, which `megatron:` may set otherwise."""
    choices: dict[str, Any] = dict(
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # upstream's default, allgather, needs packs of equal length on every rank
        moe_router_bias_update_rate=0.0,  # upstream's 1e-3 would move the policy outside the optimizer and its learning rate
    )
    if uses_transformer_engine():
        choices |= dict(moe_grouped_gemm=True)
        if "window_size" in settings or "softmax_type" in settings:
            choices |= dict(cp_comm_type="a2a")  # Transformer Engine's other kinds of context parallelism know no window in packs, and no sinks
    else:
        choices |= dict(
            transformer_impl="local",
            use_cpu_initialization=not torch.cuda.is_available(),
            apply_rope_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            bias_activation_fusion=False,
            persist_layer_norm=False,
            moe_permute_fusion=False,
            moe_grouped_gemm=False,
        )
    return choices


def _check_megatron_section(config: Config, settings: dict[str, Any]) -> None:
    known = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    faults = []
    for key, value in config.megatron.items():
        if key in type(config.parallel).model_fields:
            faults.append(f"megatron.{key}={value!r}: set parallel.{key} instead")
        elif key in ("overlap_p2p_comm", "batch_p2p_comm") and key in settings:
            if value != settings[key]:
                faults.append(f"megatron.{key}={value!r}: with virtual pipeline stages Megatron-Core then computes wrong gradients; leave it out")
        elif key in settings:
            faults.append(f"megatron.{key}={value!r}: follows from the model and the other sections ({settings[key]!r}); leave it out")
        elif key in _REFUSED and value != known[key]:
            faults.append(f"megatron.{key}={value!r}: {_REFUSED[key]}; leave it out")
        elif key == "tp_comm_overlap" and value and config.megatron.get("deterministic_mode"):
            faults.append("megatron.tp_comm_overlap=True does not compute the same bits twice; leave it or megatron.deterministic_mode out")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            faults.append(f"megatron.{key}: TransformerConfig has no such field" + (f"; did you mean {near[0]!r}?" if near else ""))
    if "num_moe_experts" in settings:
        faults += refused_settings(config.megatron, router_replay=config.rollout.router_replay, best_groups=ranks_groups_by_best(settings))
    if faults:
        raise UserError("settings that cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))


def sets_stage_layers(key: str) -> bool:
    """Whether a TransformerConfig field gives pipeline stages unequal numbers of layers."""
    return key.startswith(("num_layers_in_", "account_for_")) or key == "pipeline_model_parallel_layout"


def whole_on_one_rank(config: Config) -> Config:
    """The configuration that puts the whole model on one rank and keeps all activations.

    Megatron-Core frees the inputs of what it recomputes selectively in its backward pass, so a graph that is differentiated twice
    must recompute nothing; a pass without gradients has nothing to recompute.
    """
    megatron = {key: value for key, value in config.megatron.items() if not (sets_stage_layers(key) or key.startswith("recompute_"))}
    return config.model_copy(update={"parallel": type(config.parallel)(), "megatron": megatron})


def check_divisible(config: Config, hf: HuggingFaceModel) -> None:
    """Refuses a model that the parallel sizes do not divide; the vocabulary is padded and never refused."""
    settings = hf.settings
    tp = config.parallel.tensor_model_parallel_size
    stages = config.parallel.pipeline_model_parallel_size * (config.parallel.virtual_pipeline_model_parallel_size or 1)
    uneven = any(value and sets_stage_layers(key) for key, value in config.megatron.items())
    compressed = settings.get("kv_lora_rank", 0) + settings.get("qk_pos_emb_head_dim", 0)
    checks = [
        ("num_attention_heads", settings["num_attention_heads"], "parallel.tensor_model_parallel_size", tp),
        ("num_key_value_heads", settings["num_query_groups"], "parallel.tensor_model_parallel_size", tp),
        ("intermediate_size", settings["ffn_hidden_size"], "parallel.tensor_model_parallel_size", tp),
        ("q_lora_rank", settings.get("q_lora_rank") or 0, "parallel.tensor_model_parallel_size", tp),
        ("kv_lora_rank + qk_rope_head_dim", compressed, "parallel.tensor_model_parallel_size", tp),
        ("n_shared_experts * moe_intermediate_size", settings.get("moe_shared_expert_intermediate_size", 0), "parallel.tensor_model_parallel_size", tp),
        ("num_experts", settings.get("num_moe_experts", 0), "parallel.expert_model_parallel_size", config.parallel.expert_model_parallel_size),
        ("moe_intermediate_size", settings.get("moe_ffn_hidden_size", 0), "parallel.expert_tensor_parallel_size", config.parallel.expert_tensor_parallel_size),
        ("num_hidden_layers", 0 if uneven else settings["num_layers"], "the number of pipeline stages", stages),
    ]
    faults = [f"{what} {size} of {hf.path} is not divisible by {divisor_name} {divisor}" for what, size, divisor_name, divisor in checks if size % divisor]
    if config.parallel.expert_model_parallel_size > 1 and "num_moe_experts" not in settings:
        faults.append(f"parallel.expert_model_parallel_size {config.parallel.expert_model_parallel_size}, but {hf.path} is a dense model")
    if settings.get("add_bias_linear") and config.parallel.expert_tensor_parallel_size > 1:
        size = config.parallel.expert_tensor_parallel_size
        faults.append(f"parallel.expert_tensor_parallel_size {size}, but Megatron-Core does not cut experts with biases, which {hf.path} has")
    if faults:
        raise UserError("\n".join(faults) + "; choose sizes that divide the model")


def build_model(config: Config, hf: HuggingFaceModel, parallel: Parallel, *, is_critic: bool = False) -> Model:
    """Builds this rank's layers, without weights. Collective over the world only in that every rank must call it."""
    megatron = transformer_config(config, hf)
    padded_vocab_size = hf.padded_vocab_size(config.parallel.tensor_model_parallel_size, config.model.make_vocab_size_divisible_by)
    rope = hf.rope
    chunks = []
    for stage in range(parallel.virtual_stages or 1):
        vp_stage = stage if parallel.virtual_stages else None
        spec = _block_spec(megatron, vp_stage)
        use_packed_router(spec)
        chunk = GPTModel(
            megatron,
            spec,
            vocab_size=padded_vocab_size,
            max_sequence_length=hf.config.max_position_embeddings,
            pre_process=parallel.groups.pp.rank() == 0 and not vp_stage,
            post_process=parallel.is_last_stage and (vp_stage is None or vp_stage == parallel.virtual_stages - 1),  # type: ignore[operator]
            share_embeddings_and_output_weights=hf.tied and not is_critic,
            position_embedding_type="rope",
            parallel_output=True,
            pg_collection=parallel.groups,
            vp_stage=vp_stage,
        )
        if megatron.multi_latent_attention:
            for layer in chunk.decoder.layers:
                layer.self_attention.rotary_pos_emb = LatentRotaryEmbedding(rope, parallel.groups.cp)
        elif uses_transformer_engine():
            chunk.rotary_pos_emb.inv_freq = rope.inv_freq
        else:
            chunk.rotary_pos_emb = PackedRotaryEmbedding(rope, parallel.groups.cp)
        for experts in (module.local_experts for module in chunk.modules() if isinstance(module, SequentialMLP)):
            for expert in experts:
                give_enough_rows(expert)
                if megatron.add_bias_linear:
                    expert.linear_fc2.register_forward_hook(_without_view)
        if is_critic and chunk.post_process:
            # GPTModel always makes an output layer over the vocabulary; it is freed here, before gradients and optimizer state are made for it.
            chunk.output_layer = ValueLayer(megatron)
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # Megatron marks experts only in layouts that cut them; a checkpoint can cross layouts only if they are marked in all.
                parameter.allreduce = False
                # Also in layouts where it marks their biases for the sum over sequence-parallel ranks, which expert-data parallelism already contains.
                parameter.sequence_parallel = False
            if name.endswith(".softmax_offset"):
                # Not marked by Transformer Engine either: the norm of the gradient would count the sinks of the first tensor-parallel rank only.
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        chunks.append(chunk.to(parallel.device))
    return Model(hf, megatron, padded_vocab_size, chunks, parallel, is_critic)


def _without_view(layer: torch.nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A forward hook: Megatron-Core adds an expert's bias in place, which autograd forbids on the view that a reduction over one rank returns."""
    product, bias = output
    return product.clone(), bias


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one stage; without Transformer Engine with our norm and attention in them."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=uses_transformer_engine(), normalization="RMSNorm", vp_stage=vp_stage)
    if config.multi_latent_attention:
        for spec in block.layer_specs:
            spec.submodules.self_attention.module = LatentSelfAttention
    if uses_transformer_engine():
        return block
    # Without `layer_norm` Megatron puts its own norm back at the end of the decoder, which refuses sequence parallelism.
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:
        layer, attention = spec.submodules, spec.submodules.self_attention.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention.core_attention = PackedDotProductAttention
        if config.multi_latent_attention:
            attention.q_layernorm = attention.kv_layernorm = RMSNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block
