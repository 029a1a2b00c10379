"""vLLM takes the weights of every architecture over the transfer, twice, and then answers as transformers does.

The engine starts without weights. Each update must reach every layer, so a second model's answers show what the first one left behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout.pool import RolloutPool
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.types import Prompt
from tests.models import CONFIGS, VOCAB_SIZE, make_tokenizer, random_model

# tests/e2e does the same with Qwen3-MoE. The tiny Mistral and gpt-oss have windows, which most prompts here are longer than.
KINDS = ["llama", "mistral", "qwen2", "mixtral_moe", "glm4_moe", "gpt_oss_moe", "deepseek_v2_moe", "deepseek_v3_moe"]
WINDOW = dict(use_sliding_window=True, sliding_window=5)
WINDOWS: dict[str, dict[str, Any]] = {"qwen3": WINDOW | {"max_window_layers": 0}, "qwen3_moe": WINDOW, "mixtral_moe": {"sliding_window": 5}}
MAX_PROMPT_TOKENS = 70
MAX_RESPONSE_TOKENS = 12
LENGTHS = (3, 1, 20, MAX_PROMPT_TOKENS)


def _config(kind: str, changes: dict[str, Any]) -> PretrainedConfig:
    """The tiny model of `kind`, with the one size of latents that vLLM's decoding has on a CPU."""
    fields = CONFIGS[kind].to_dict() | changes
    if "max_window_layers" in changes:
        del fields["layer_types"]  # which follow
    if "kv_lora_rank" in fields:
        fields = {name: value for name, value in fields.items() if name not in ("head_dim", "qk_head_dim")} | dict(kv_lora_rank=512, qk_rope_head_dim=64)
    return type(CONFIGS[kind]).from_dict(fields)


def _prompts() -> list[Prompt]:
    draw = torch.Generator().manual_seed(0)
    return [Prompt(row, "test", (), tuple(torch.randint(2, VOCAB_SIZE, (length,), generator=draw).tolist()), None) for row, length in enumerate(LENGTHS)]


def _logits(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def _gpt_oss_experts(directory: Path, tokens: tuple[int, ...]) -> Tensor:
    """transformers' choice, sorted: [tokens, layers, experts per token]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager").eval()
    chosen: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda router, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([tokens]))
    return torch.stack(chosen, 1).sort(-1).values


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in KINDS), *WINDOWS.items()])
def test_engine_answers_as_transformers_after_each_update(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    check_answers(tmp_path, _config(kind, changes))


def check_answers(work: Path, config: PretrainedConfig) -> None:
    """An engine that started without weights answers as each of two models of the architecture, once it has that model's weights."""
    models = {version: work / str(version) for version in (1, 2)}
    for version, directory in models.items():
        random_model(config, seed=version).save_pretrained(directory)
        make_tokenizer().save_pretrained(directory)
    records = config.model_type == "gpt_oss"  # its routers have another name than those of Qwen3-MoE, of which tests/e2e compares the record
    deadlines = dict(start_timeout_s=240, generate_timeout_s=60, weight_transfer_timeout_s=60)
    settings = RolloutConfig(num_engines=1, max_response_tokens=MAX_RESPONSE_TOKENS, router_replay=records, **deadlines)
    with RolloutPool(settings, model_dir=models[1], dtype="float32", max_prompt_tokens=MAX_PROMPT_TOKENS, load_weights=False) as pool:
        for version, directory in models.items():
            tensors = load_file(directory / "model.safetensors")
            described = [TensorMetadata(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
            pool.send_weights(described, iter(tensors.items()), version)
            prompts = _prompts()
            answers = pool.generate(prompts, n=1, temperature=0, max_response_tokens=MAX_RESPONSE_TOKENS, seed=None)
            sampled = pool.generate(prompts, n=1, temperature=1.0, max_response_tokens=MAX_RESPONSE_TOKENS, seed=1)
            for prompt, (greedy,), (drawn,) in zip(prompts, answers, sampled, strict=True):
                rows = _logits(directory, prompt.token_ids + greedy.token_ids)[len(prompt.token_ids) - 1 : -1]
                assert rows.argmax(-1).tolist() == list(greedy.token_ids)
                rows = torch.log_softmax(_logits(directory, prompt.token_ids + drawn.token_ids)[len(prompt.token_ids) - 1 : -1], -1)
                expected = rows.gather(1, torch.tensor(drawn.token_ids)[:, None])[:, 0]
                assert float((expected - torch.tensor(drawn.log_probs)).abs().max()) < 1e-4
                if records:
                    found = torch.from_numpy(drawn.routed_experts.array().astype("int64"))
                    assert torch.equal(found.sort(-1).values, _gpt_oss_experts(directory, prompt.token_ids + drawn.token_ids)[:-1])
