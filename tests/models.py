"""Tiny random models of every supported architecture, with transformers as the oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config, Qwen3MoeConfig

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

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_DIMENSIONS, head_dim=32),
    "qwen2": Qwen2Config(**_DIMENSIONS),
    "qwen3": Qwen3Config(**_DIMENSIONS, head_dim=32),
    "qwen3_tied": Qwen3Config(**_DIMENSIONS | _EIGHT_HEADS, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**_DIMENSIONS | _EIGHT_HEADS, **_MOE),
    "qwen3_moe_unnormalised": Qwen3MoeConfig(**_DIMENSIONS, head_dim=32, **_MOE | {"norm_topk_prob": False}),
}


def make_model(directory: Path, kind: str, seed: int = 0) -> PreTrainedModel:
    """Writes a random model of `kind` to `directory`, with a tokenizer of one token a character, and returns it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):  # not all ones or zeros, so that a missing or misplaced one shows
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: "<pad>", "<eos>" and 95 printable ones, with a chat template."""
    vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    return fast
