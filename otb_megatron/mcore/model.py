"""A Hugging Face model as Megatron-Core's GPTModel, cut over the parallel groups."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_submodules
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from otb_megatron.config import Config
from otb_megatron.mcore.attention import PackedDotProductAttention, PackedRotaryEmbedding
from otb_megatron.mcore.head import ValueLayer
from otb_megatron.mcore.norm import RMSNorm
from otb_megatron.mcore.parallel import Parallel
from otb_megatron.mcore.platform import uses_transformer_engine
from otb_megatron.mcore.router import refused_settings, use_packed_router
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel, Rule


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
    try:
        return TransformerConfig(**settings | _choices() | config.megatron)
    except (AssertionError, ValueError, TypeError) as error:
        raise UserError(f"Megatron-Core refuses the configuration: {error}") from error


def _settings(config: Config, hf: HuggingFaceModel) -> dict[str, Any]:
    """TransformerConfig fields that follow from the model, the other sections or the training step; `megatron:` may not set them."""
    parallel, dtype = config.parallel, getattr(torch, config.model.dtype)
    settings: dict[str, Any] = hf.architecture.settings(hf.config)
    settings.pop("rotary_base")
    settings |= dict(
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
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


def _choices() -> dict[str, Any]:
    """Fields with a default of ours, which `megatron:` may set otherwise."""
    choices: dict[str, Any] = dict(
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",  # upstream's default refuses variable_seq_lengths, for dense models too
        moe_router_bias_update_rate=0.0,  # upstream's 1e-3 would move the policy outside the optimizer and its learning rate
    )
    if uses_transformer_engine():
        choices |= dict(moe_grouped_gemm=True)
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
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    faults = []
    for key, value in config.megatron.items():
        if key in type(config.parallel).model_fields:
            faults.append(f"megatron.{key}={value!r}: set parallel.{key} instead")
        elif key in ("overlap_p2p_comm", "batch_p2p_comm") and key in settings:
            if value != settings[key]:
                faults.append(f"megatron.{key}={value!r}: with virtual pipeline stages Megatron-Core then computes wrong gradients; leave it out")
        elif key in settings:
            faults.append(f"megatron.{key}={value!r}: follows from the model and the other sections ({settings[key]!r}); leave it out")
        elif key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            faults.append(f"megatron.{key}: TransformerConfig has no such field" + (f"; did you mean {near[0]!r}?" if near else ""))
    if "num_moe_experts" in settings:
        faults += refused_settings(config.megatron, router_replay=config.rollout.router_replay)
    if faults:
        raise UserError("settings that cannot be used:\n" + "\n".join(f"  {fault}" for fault in faults))


def sets_stage_layers(key: str) -> bool:
    """Whether a TransformerConfig field gives pipeline stages unequal numbers of layers."""
    return key.startswith("num_layers_in_") or key == "pipeline_model_parallel_layout"


def check_divisible(config: Config, hf: HuggingFaceModel) -> None:
    """Refuses a model that the parallel sizes do not divide; the vocabulary is padded and never refused."""
    settings = hf.architecture.settings(hf.config)
    tp = config.parallel.tensor_model_parallel_size
    stages = config.parallel.pipeline_model_parallel_size * (config.parallel.virtual_pipeline_model_parallel_size or 1)
    uneven = any(sets_stage_layers(key) for key in config.megatron)
    checks = [
        ("num_attention_heads", settings["num_attention_heads"], "parallel.tensor_model_parallel_size", tp),
        ("num_key_value_heads", settings["num_query_groups"], "parallel.tensor_model_parallel_size", tp),
        ("intermediate_size", settings["ffn_hidden_size"], "parallel.tensor_model_parallel_size", tp),
        ("num_experts", settings.get("num_moe_experts", 0), "parallel.expert_model_parallel_size", config.parallel.expert_model_parallel_size),
        ("moe_intermediate_size", settings.get("moe_ffn_hidden_size", 0), "parallel.expert_tensor_parallel_size", config.parallel.expert_tensor_parallel_size),
        ("num_hidden_layers", 0 if uneven else settings["num_layers"], "the number of pipeline stages", stages),
    ]
    faults = [f"{what} {size} of {hf.path} is not divisible by {divisor_name} {divisor}" for what, size, divisor_name, divisor in checks if size % divisor]
    if config.parallel.expert_model_parallel_size > 1 and "num_moe_experts" not in settings:
        faults.append(f"parallel.expert_model_parallel_size {config.parallel.expert_model_parallel_size}, but {hf.path} is a dense model")
    if faults:
        raise UserError("\n".join(faults) + "; choose sizes that divide the model")


def build_model(config: Config, hf: HuggingFaceModel, parallel: Parallel, *, is_critic: bool = False) -> Model:
    """Builds this rank's layers, without weights. Collective over the world only in that every rank must call it."""
    megatron = transformer_config(config, hf)
    padded_vocab_size = hf.padded_vocab_size(config.parallel.tensor_model_parallel_size, config.model.make_vocab_size_divisible_by)
    chunks = []
    for stage in range(parallel.virtual_stages or 1):
        vp_stage = stage if parallel.virtual_stages else None
        spec = _block_spec(megatron, vp_stage)
        use_packed_router(spec)
        chunk = GPTModel(
            megatron,
            spec,
            vocab_size=padded_vocab_size,
            max_sequence_length=hf.config.get("max_position_embeddings", 2**20),
            pre_process=parallel.groups.pp.rank() == 0 and not vp_stage,
            post_process=parallel.is_last_stage and (vp_stage is None or vp_stage == parallel.virtual_stages - 1),  # type: ignore[operator]
            share_embeddings_and_output_weights=hf.tied and not is_critic,
            position_embedding_type="rope",
            rotary_base=hf.architecture.settings(hf.config)["rotary_base"],
            parallel_output=True,
            pg_collection=parallel.groups,
            vp_stage=vp_stage,
        )
        if not uses_transformer_engine():
            chunk.rotary_pos_emb = PackedRotaryEmbedding(
                kv_channels=megatron.kv_channels,
                rotary_percent=1.0,
                rotary_base=hf.architecture.settings(hf.config)["rotary_base"],
                use_cpu_initialization=megatron.use_cpu_initialization,
                cp_group=parallel.groups.cp,
            )
        if is_critic and chunk.post_process:
            # GPTModel always makes an output layer over the vocabulary; it is freed here, before gradients and optimizer state are made for it.
            chunk.output_layer = ValueLayer(megatron)
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # Megatron marks experts only in layouts that cut them; a checkpoint can cross layouts only if they are marked in all.
                parameter.allreduce = False
        chunks.append(chunk.to(parallel.device))
    return Model(hf, megatron, padded_vocab_size, chunks, parallel, is_critic)


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    if uses_transformer_engine():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    layer = get_gpt_layer_local_submodules(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedDotProductAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    # Without `layer_norm` Megatron puts its own norm back at the end of the decoder, which refuses sequence parallelism.
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config, vp_stage), layer_norm=RMSNorm)
