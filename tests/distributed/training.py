"""Whole training runs on gloo ranks from recorded samples, for tests that compare parallel layouts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.rollout.recording import save_rollouts
from otb_megatron.trainer.learner import Learner
from otb_megatron.trainer.loop import train as train_loop
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate
from otb_megatron.types import Prompt, Response, Sample
from tests.distributed.launcher import run_ranks

NUM_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """What a run computed."""

    advantages: list[Tensor]  # [step] -> [actions]
    weights: dict[str, Tensor]  # under Hugging Face names, after the last step
    metrics: list[dict[str, float]]  # [step]


def record_samples(directory: Path, *, vocab_size: int, num_steps: int = NUM_STEPS, seed: int = 0, group_size: int = 3) -> None:
    """Random prompts, responses of ragged length, sampling log-probs and rewards: 5 groups a step."""
    draw = random.Random(seed)
    for step in range(1, num_steps + 1):
        samples = []
        for group in range(5):
            prompt = Prompt(group, "test", (), tuple(draw.randrange(2, vocab_size) for _ in range(draw.randint(1, 9))), "", {})
            for _ in range(group_size):
                length = draw.randint(1, 14)
                tokens = tuple(draw.randrange(2, vocab_size) for _ in range(length))
                log_probs = tuple(-draw.random() * 3 for _ in range(length))
                samples.append(Sample(prompt, Response(tokens, log_probs, "", "stop", step - 1), group, float(draw.random() < 0.5)))
        save_rollouts(directory, step, samples)


def settings(model_dir: Path, work_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration that replays `work_dir`/rollouts; `sections` are merged over it."""
    prompts = work_dir / "prompts.jsonl"
    row = {"data_source": "test", "prompt": [{"role": "user", "content": "1+1"}], "reward_model": {"ground_truth": "2"}}
    prompts.write_text((json.dumps(row) + "\n") * 5)
    base: dict[str, Any] = {
        "model": {"path": str(model_dir), "dtype": "float32", "make_vocab_size_divisible_by": 8},
        "data": {"train": {"path": str(prompts)}, "prompts_per_step": 5},
        "optimizer": {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5},
        "rollout": {"n": 3, "replay_dir": str(work_dir / "rollouts"), "temperature": 0.9},
        "trainer": {"num_steps": NUM_STEPS, "output_dir": str(work_dir / "run"), "max_tokens_per_microbatch": 64, "deadline_s": 60},
        "telemetry": {"progress": False, "tensorboard": False},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return base


def train(values: dict[str, Any], world_size: int, *, timeout_s: float = 240) -> Outcome:
    """Runs the training loop on `world_size` ranks and returns what it computed."""
    ranks = run_ranks(_train_rank, world_size, values, timeout_s=timeout_s)
    num_actions = [sum(index.numel() for index, _ in step) for step in ranks[0]["advantages"]]
    advantages = []
    for step in range(len(num_actions)):
        pieces = [piece for rank in ranks for piece in rank["advantages"][step]]
        merged = torch.full((int(torch.cat([index for index, _ in pieces]).max()) + 1,), torch.nan)
        for index, values_of_piece in pieces:
            merged[index] = values_of_piece
        advantages.append(merged)
    return Outcome(advantages, ranks[0]["weights"], ranks[0]["metrics"])


def _train_rank(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    config = validate_config(values, "test")
    seen: list[list[tuple[Tensor, Tensor]]] = []
    update = Learner.update

    def observed(self: Any, batch: Any, inputs: Any) -> Any:
        pairs = [(m.action_index, i.advantages) for part, of_part in zip(batch.microbatches, inputs, strict=True) for m, i in zip(part, of_part, strict=True)]
        seen.append(pairs)
        return update(self, batch, inputs)

    Learner.update = observed  # type: ignore[method-assign]
    with Run(config, "train", validate(config, "train", world_size)) as run:
        train_loop(run)
        weights = {name: tensor.clone() for name, tensor in run.learner.weights.tensors()}
        lines = (config.trainer.output_dir / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    return {"advantages": seen, "weights": weights, "metrics": [json.loads(line) for line in lines]}


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Over all weights, relative to the largest value of each."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max() / right[name].abs().max()) for name in left)
