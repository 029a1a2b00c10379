"""The arguments of vLLM's engine: what the configuration gives, what this project fixes and why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout.transfer import BACKEND
from otb_megatron.types import UserError

_DISTRIBUTION = "the policy is trained on the distribution it was sampled from, which is the whole vocabulary at rollout.temperature"
_OURS = "set by the rollout pool"

REFUSED = {
    "top_p": _DISTRIBUTION,
    "top_k": _DISTRIBUTION,
    "min_p": _DISTRIBUTION,
    "temperature": "set rollout.temperature",
    "repetition_penalty": _DISTRIBUTION,
    "presence_penalty": _DISTRIBUTION,
    "frequency_penalty": _DISTRIBUTION,
    "logit_bias": _DISTRIBUTION,
    "logits_processors": _DISTRIBUTION,
    "override_generation_config": _DISTRIBUTION,
    "generation_config": _OURS + ": end-of-sequence tokens are read from generation_config.json, its sampling defaults are not",
    "logprobs_mode": _OURS + ": log-probs must be those of the sampling distribution",
    "n": "set rollout.n",
    "max_tokens": "set rollout.max_response_tokens",
    "model": "set model.path",
    "dtype": "set model.dtype",
    "seed": "set rollout.seed",
    "tensor_parallel_size": "set rollout.tensor_parallel_size",
    "pipeline_parallel_size": "an engine shards its model by rollout.tensor_parallel_size only",
    "data_parallel_size": "set rollout.num_engines",
    "distributed_executor_backend": _OURS,
    "tokenizer": _OURS + ": engines take and give token ids",
    "skip_tokenizer_init": _OURS + ": engines take and give token ids",
    "load_format": _OURS,
    "weight_transfer_config": _OURS,
    "worker_extension_cls": _OURS,
    "enable_return_routed_experts": "set rollout.router_replay",
}
"""Keys of `rollout.vllm` that cannot be used, with the reason."""

CPU_BLOCK_TOKENS = 128  # vLLM's default size of a key-value block on a CPU


def engine_arguments(config: RolloutConfig, *, model_dir: Path, dtype: str, max_model_tokens: int, load_weights: bool, on_gpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's engine, without the seed, which differs from engine to engine.

    Raises:
        UserError: every key of `rollout.vllm` that cannot be used, with the reason.
    """
    refused = [f"  rollout.vllm.{key}: {REFUSED[key]}" for key in config.vllm if key in REFUSED]
    if not on_gpu and config.vllm.get("enable_chunked_prefill"):
        refused.append("  rollout.vllm.enable_chunked_prefill: a seeded prompt cut into chunks crashes vLLM's CPU sampler")
    if config.router_replay:
        refused += _no_records(config.vllm, on_gpu)
    if refused:
        raise UserError(f"{len(refused)} argument(s) of vLLM cannot be used:\n" + "\n".join(refused))
    arguments = {
        "model": str(model_dir),
        "dtype": dtype,
        "max_model_len": max_model_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "distributed_executor_backend": "uni" if config.tensor_parallel_size == 1 else "mp",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "load_format": "auto" if load_weights else "dummy",
        "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": "otb_megatron.rollout.receiver.WorkerExtension",
        "disable_log_stats": True,
    }
    if not on_gpu:
        arguments |= _cpu_defaults(model_dir, dtype, max_model_tokens)
    if config.router_replay:
        # On a GPU vLLM returns the experts itself and keeps those of cached prompts; on a CPU they are recorded where they are computed.
        arguments |= {"enable_return_routed_experts": True} if on_gpu else {"enable_prefix_caching": False}
    return arguments | config.vllm


def _no_records(arguments: dict[str, Any], on_gpu: bool) -> list[str]:
    """Arguments under which an engine cannot tell the experts of every token."""
    reasons = {"enable_prefix_caching": (False, "vLLM keeps the experts of a token beside its prefix cache")}
    if not on_gpu:
        reasons = {
            "enable_prefix_caching": (True, "on a CPU, experts are recorded where they are computed, and tokens from a cache are not"),
            "enforce_eager": (False, "on a CPU, experts are recorded in eager mode"),
        }
    refused = [(key, value, reason) for key, (value, reason) in reasons.items() if arguments.get(key) is value]
    return [f"  rollout.vllm.{key}={value}: {reason}; leave it out, or set rollout.router_replay=false" for key, value, reason in refused]


def _cpu_defaults(model_dir: Path, dtype: str, max_model_tokens: int) -> dict[str, Any]:
    """What vLLM needs to be told on a CPU.

    Compiling costs more than it gives at the sizes that fit one, vLLM would take nine tenths of the memory for
    key-value blocks, and a prompt cut into chunks crashes its sampler when requests carry seeds.
    """
    model_config = json.loads((model_dir / "config.json").read_text())
    blocks = math.ceil(max_model_tokens / CPU_BLOCK_TOKENS)
    sequence_bytes = blocks * CPU_BLOCK_TOKENS * key_value_bytes_per_token(model_config, getattr(torch, dtype))
    some_sequences = min(max(64 * sequence_bytes, 64 * 2**20), 2 * 2**30)  # as many as fit run at once, the others wait
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": max(some_sequences, sequence_bytes),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_tokens, 4096),
    }


def key_value_bytes_per_token(model_config: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes that one token takes in the key-value cache of a model with the given config.json."""
    heads = model_config["num_attention_heads"]
    head_dim = model_config.get("head_dim") or model_config["hidden_size"] // heads
    return 2 * model_config["num_hidden_layers"] * model_config.get("num_key_value_heads", heads) * head_dim * dtype.itemsize


def end_tokens(model_dir: Path, tokenizer_end_token: int | None) -> list[int]:
    """Token ids that end a response: those of generation_config.json, and the tokenizer's.

    Raises:
        UserError: there is none, so that every response would run to its full length.
    """
    ids = set() if tokenizer_end_token is None else {tokenizer_end_token}
    path = model_dir / "generation_config.json"
    if path.exists():
        configured = json.loads(path.read_text()).get("eos_token_id")
        ids |= set(configured if isinstance(configured, list) else [] if configured is None else [configured])
    if not ids:
        raise UserError(f"{model_dir} names no end-of-sequence token; set eos_token in tokenizer_config.json or eos_token_id in generation_config.json")
    return sorted(ids)
