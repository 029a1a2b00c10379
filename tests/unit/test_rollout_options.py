"""Arguments of vLLM's engine: what is refused and why, what is fixed, and the sizes chosen on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout.engine import check_known
from otb_megatron.rollout.options import end_tokens, engine_arguments, key_value_bytes_per_token
from otb_megatron.types import UserError

QWEN3_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}


def arguments(model_dir: Path, *, on_gpu: bool = False, load_weights: bool = True, **vllm: Any) -> dict[str, Any]:
    (model_dir / "config.json").write_text(json.dumps(QWEN3_8B))
    return engine_arguments(RolloutConfig(vllm=vllm), model_dir=model_dir, dtype="bfloat16", max_model_tokens=300, load_weights=load_weights, on_gpu=on_gpu)


def test_the_sampling_distribution_is_fixed(tmp_path: Path):
    chosen = arguments(tmp_path, on_gpu=True)
    assert chosen["logprobs_mode"] == "processed_logprobs"
    assert chosen["generation_config"] == "vllm"  # or generation_config.json's top_p would apply
    assert (chosen["load_format"], arguments(tmp_path, load_weights=False)["load_format"]) == ("auto", "dummy")


def test_all_unusable_arguments_are_named_at_once(tmp_path: Path):
    with pytest.raises(UserError) as caught:
        arguments(tmp_path, top_p=0.9, logprobs_mode="raw_logprobs", dtype="float16", enable_chunked_prefill=True, max_num_seqs=4)
    lines = str(caught.value).splitlines()
    assert lines[0] == "4 argument(s) of vLLM cannot be used:"
    assert [line.split(":")[0] for line in lines[1:]] == [f"  rollout.vllm.{key}" for key in ("top_p", "logprobs_mode", "dtype", "enable_chunked_prefill")]
    assert lines[3] == "  rollout.vllm.dtype: set model.dtype"


def test_arguments_of_the_user_win_over_defaults(tmp_path: Path):
    chosen = arguments(tmp_path, max_model_len=256, enforce_eager=False, gpu_memory_utilization=0.5)
    assert (chosen["max_model_len"], chosen["enforce_eager"], chosen["gpu_memory_utilization"]) == (256, False, 0.5)


def test_router_replay_asks_vllm_on_a_gpu_and_records_on_a_cpu(tmp_path: Path):
    """vLLM's records lie beside its prefix cache; ours are made where a token is computed, so nothing may come from a cache."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))

    def chosen(on_gpu: bool, **vllm: Any) -> dict[str, Any]:
        config = RolloutConfig(router_replay=True, vllm=vllm)
        return engine_arguments(config, model_dir=tmp_path, dtype="bfloat16", max_model_tokens=300, load_weights=True, on_gpu=on_gpu)

    assert chosen(True)["enable_return_routed_experts"] is True and "enable_prefix_caching" not in chosen(True)
    assert chosen(False)["enable_prefix_caching"] is False and "enable_return_routed_experts" not in chosen(False)
    for on_gpu, refused in ((True, {"enable_prefix_caching": False}), (False, {"enable_prefix_caching": True}), (False, {"enforce_eager": False})):
        with pytest.raises(UserError, match=f"rollout.vllm.{next(iter(refused))}=.*rollout.router_replay=false"):
            chosen(on_gpu, **refused)
    with pytest.raises(UserError, match="enable_return_routed_experts: set rollout.router_replay"):
        arguments(tmp_path, enable_return_routed_experts=True)


def test_a_gpu_keeps_the_defaults_of_vllm(tmp_path: Path):
    assert not arguments(tmp_path, on_gpu=True).keys() & {"enforce_eager", "kv_cache_memory_bytes", "enable_chunked_prefill", "max_num_batched_tokens"}


def test_key_value_cache_of_a_cpu(tmp_path: Path):
    """36 layers x 8 heads x 128 x 2 bytes, for keys and for values, are 147456 bytes a token; 64 sequences of 300 tokens fill 3 blocks
    of 128 each, which would be 3.4 GiB and is cut to 2 GiB. A model without GQA keys has as many heads there as elsewhere."""
    assert key_value_bytes_per_token(QWEN3_8B, torch.bfloat16) == 147456
    assert arguments(tmp_path)["kv_cache_memory_bytes"] == 2 * 2**30
    plain = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert key_value_bytes_per_token(plain, torch.float32) == 2 * 2 * 4 * 16 * 4


def test_unknown_arguments_are_all_named_with_the_nearest_known_one():
    with pytest.raises(UserError) as caught:
        check_known({"max_num_seq": 1, "xyzzy": 2, "dtype": "auto"}, {"max_num_seqs", "dtype"})
    assert str(caught.value).splitlines() == [
        "rollout.vllm.max_num_seq: vLLM's engine has no such argument; did you mean 'max_num_seqs'?",
        "rollout.vllm.xyzzy: vLLM's engine has no such argument",
    ]


@pytest.mark.parametrize(
    ("generation_config", "tokenizer", "expected"),
    [({"eos_token_id": [7, 3]}, 5, [3, 5, 7]), ({"eos_token_id": 7}, 7, [7]), ({"top_p": 0.8}, 5, [5]), (None, 5, [5]), ({"eos_token_id": 0}, None, [0])],
)
def test_end_tokens(tmp_path: Path, generation_config: dict[str, Any] | None, tokenizer: int | None, expected: list[int]):
    """Those of both files; id 0 is a token like others."""
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert end_tokens(tmp_path, tokenizer) == expected


def test_a_model_without_end_token_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="names no end-of-sequence token; set eos_token"):
        end_tokens(tmp_path, None)
