"""Tiny random models of every supported architecture, with transformers as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    HYV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 97  # odd, so that every tensor-parallel size needs padding

_DIMENSIONS = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    bos_token_id=None,
    eos_token_id=1,
    pad_token_id=0,
)
_EIGHT_HEADS = dict(head_dim=32, num_attention_heads=8, num_key_value_heads=4)  # for tensor parallelism of 4
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True, router_aux_loss_coef=0.0)
_SHARED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=2, first_k_dense_replace=1)
# 64 = 32 without position + 32 with; a value dimension of its own; ranks that TP 2 divides.
_LATENT = _SHARED | dict(n_routed_experts=8, n_group=4, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128, mscale=1.0, mscale_all_dim=0.7)

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_DIMENSIONS, head_dim=32),
    "qwen2": Qwen2Config(**_DIMENSIONS | dict(hidden_size=128)),  # heads of 32, the smallest that vLLM has on a CPU
    "qwen3": Qwen3Config(**_DIMENSIONS, head_dim=32),
    "qwen3_tied": Qwen3Config(**_DIMENSIONS | _EIGHT_HEADS, tie_word_embeddings=True),
    "qwen3_window": Qwen3Config(**_DIMENSIONS, head_dim=32, use_sliding_window=True, sliding_window=4, max_window_layers=1),  # one layer without, three with
    "qwen3_moe": Qwen3MoeConfig(**_DIMENSIONS | _EIGHT_HEADS, **_MOE),
    "qwen3_moe_unnormalised": Qwen3MoeConfig(**_DIMENSIONS, head_dim=32, **_MOE | {"norm_topk_prob": False}),
    "mistral": MistralConfig(**_DIMENSIONS, head_dim=32, sliding_window=5),
    "mixtral_moe": MixtralConfig(**_DIMENSIONS, head_dim=32, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0),
    "deepseek_v3_moe": DeepseekV3Config(
        **_DIMENSIONS | _LATENT, q_lora_rank=48, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", rope_parameters=_YARN
    ),
    "deepseek_v2_moe": DeepseekV2Config(
        **_DIMENSIONS | _LATENT | dict(num_experts_per_tok=4),
        q_lora_rank=None,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
        rope_parameters=_YARN,
    ),
    "gpt_oss_moe": GptOssConfig(
        **_DIMENSIONS,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, beta_fast=8.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=128),
    ),
    "glm4_moe": Glm4MoeConfig(**_DIMENSIONS, **_SHARED, head_dim=32, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
}
# A family without a table, which Megatron-Bridge describes. Its bridge reads first_k_dense_replace, transformers mlp_layer_types; vLLM the last three.
HY_V3 = HYV3Config(
    **_DIMENSIONS,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    num_nextn_predict_layers=0,
    first_k_dense_replace=1,
    expert_hidden_dim=32,
    qk_norm=True,
    route_norm=True,
)


def make_model(directory: Path, kind: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Writes a random model of `kind` to `directory`, with a tokenizer of one token a character, and returns it.

    Args:
        changes: fields of its configuration that differ from those in CONFIGS.
    """
    config = CONFIGS[kind]
    model = random_model(type(config)(**config.to_dict() | changes) if changes else config, seed)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


def random_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model whose norms, biases and corrections of the routing are random as well, so that a missing or misplaced one shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn_like(buffer))
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: "<pad>", "<eos>" and 95 printable ones, with a chat template."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    return fast
