"""The experts that a real vLLM engine chose arrive with its responses, are transformers' own choice, and are trained through."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout.pool import RolloutPool
from otb_megatron.rollout.recording import load_rollouts
from otb_megatron.types import Prompt, Response
from tests.e2e.test_rollout import VOCABULARY, prompt, save_model, save_tokenizer, send
from tests.models import make_model

REPOSITORY = Path(__file__).parents[2]
DEADLINES = {"start_timeout_s": 200, "generate_timeout_s": 100, "weight_transfer_timeout_s": 100}
MOE_LAYER = 1  # layer 0 of the model is dense


def own_choice(directory: Path, asked: Prompt, response: Response) -> torch.Tensor:
    """transformers' experts of every token but the last, sorted: [tokens - 1, 2]."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    chosen = []
    model.model.layers[MOE_LAYER].mlp.gate.register_forward_hook(lambda gate, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([asked.token_ids + response.token_ids]))
    return chosen[0][:-1].sort(-1).values


def assert_choices(pool: RolloutPool, directory: Path, prompts: list[Prompt]) -> int:
    """Every token's experts, of several responses to a prompt each. Returns how many tokens were compared."""
    compared = 0
    for asked, responses in zip(prompts, pool.generate(prompts, n=3, temperature=1.0, max_response_tokens=24, seed=None), strict=True):
        for response in responses:
            record = response.routed_experts
            assert record is not None and record.dtype == "uint8"
            assert record.shape == (len(asked.token_ids) + len(response.token_ids) - 1, 2, 2)
            found = torch.from_numpy(record.array()[:, MOE_LAYER].astype("int64")).sort(-1).values
            assert torch.equal(found, own_choice(directory, asked, response))
            compared += len(found)
    return compared


def test_recorded_experts_are_those_of_transformers(tmp_path: Path) -> None:
    """One engine of two tensor-parallel workers, before and after an update of its weights, prompts of 1 to 80 tokens."""
    assert VOCABULARY == 70
    for version in (1, 2):
        save_model(tmp_path / str(version), seed=version)
        save_tokenizer(tmp_path / str(version))
    config = RolloutConfig(tensor_parallel_size=2, max_response_tokens=24, router_replay=True, vllm={"max_num_seqs": 5}, **DEADLINES)
    prompts = [prompt(10, 3), prompt(11, 1), prompt(12, 20), prompt(13, 80)]
    with RolloutPool(config, model_dir=tmp_path / "1", dtype="float32", max_prompt_tokens=80, load_weights=False) as pool:
        for version in (1, 2):
            send(pool, tmp_path / str(version), version)
            assert assert_choices(pool, tmp_path / str(version), prompts) > 3 * 104


def test_a_run_trains_through_the_recorded_experts(tmp_path: Path) -> None:
    """Two ranks with expert parallelism. Trainer and engine hold the same weights in float32, so hardly any choice can differ."""
    make_model(tmp_path / "model", "qwen3_moe")
    rows = [{"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+1"}], "reward_model": {"ground_truth": str(a + 1)}} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(tmp_path / "model"), "dtype": "float32", "make_vocab_size_divisible_by": 8},
        "data": {"train": {"path": str(tmp_path / "rows.jsonl")}, "prompts_per_step": 8, "max_prompt_tokens": 16},
        "parallel": {"expert_model_parallel_size": 2},
        "megatron": {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe"],
            "moe_router_load_balancing_type": "seq_aux_loss",
            "moe_aux_loss_coeff": 1e-3,
        },
        "optimizer": {"lr": 1e-3},
        "rollout": {"n": 4, "max_response_tokens": 8, "router_replay": True, "save": True, "vllm": {"kv_cache_memory_bytes": 32 * 2**20}, **DEADLINES},
        "rewards": {"function": "tests.e2e.verifiers:digit_fraction"},
        "algorithm": {"kl_coef": 0.01},
        "trainer": {"num_steps": 2, "output_dir": str(tmp_path / "run"), "max_tokens_per_microbatch": 128, "deadline_s": 240},
        "telemetry": {"tensorboard": False},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", "--nproc-per-node", "2", "train", str(tmp_path / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stderr[-4000:]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if step["step"] > 0]
    assert len(trained) == 2
    for step in trained:
        assert step["moe/router_disagreement"] < 0.002
        assert step["rollout/log_prob_difference"] < 2e-5
        assert step["moe/seq_aux_loss"] == pytest.approx(1.0, abs=0.5)  # 1 for an even load
    assert trained[0]["loss/kl"] == 0.0  # the reference goes through the recorded experts too
    for sample in load_rollouts(tmp_path / "run" / "rollouts", 2):
        record = sample.response.routed_experts
        assert record is not None and record.shape == (len(sample.prompt.token_ids) + len(sample.response.token_ids) - 1, 4, 2)
