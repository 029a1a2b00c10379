"""Whole training runs on gloo ranks from recorded samples, for tests that compare parallel layouts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.optimizer import Optimizer
from otb_megatron.mcore.shards import FullWeights
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
    gradients: list[dict[str, Tensor]]  # [optimizer step of the policy] -> under Hugging Face names, whole, before clipping
    weights: dict[str, Tensor]  # under Hugging Face names, after the last step
    metrics: list[dict[str, float]]  # [step]
    values: list[Tensor]  # [step] -> [actions]; empty without a critic
    critic: dict[str, Tensor]  # the critic's weights, as the policy's; empty without one


def record_samples(directory: Path, *, vocab_size: int, num_steps: int = NUM_STEPS, seed: int = 0, num_groups: int = 5, group_size: int = 3) -> None:
    """Random prompts, responses of ragged length, sampling log-probs and rewards."""
    draw = random.Random(seed)
    for step in range(1, num_steps + 1):
        samples = []
        for group in range(num_groups):
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
    advantages, seen_values = ([_merged([rank[name][step] for rank in ranks]) for step in range(len(ranks[0][name]))] for name in ("advantages", "values"))
    return Outcome(advantages, ranks[0]["gradients"], ranks[0]["weights"], ranks[0]["metrics"], seen_values, ranks[0]["critic"])


def _merged(pieces_of_ranks: list[list[tuple[Tensor, Tensor]]]) -> Tensor:
    """[actions] from every rank's (indices, values) of its microbatches."""
    pieces = [piece for pieces in pieces_of_ranks for piece in pieces]
    merged = torch.full((int(torch.cat([index for index, _ in pieces]).max()) + 1,), torch.nan)
    for index, values in pieces:
        merged[index] = values
    return merged


def _train_rank(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    config = validate_config(values, "test")
    seen: dict[str, list[list[tuple[Tensor, Tensor]]]] = {"advantages": [], "values": []}
    gradients: list[dict[str, Tensor]] = []
    update_critic, step = Learner.update_critic, Optimizer.step  # the critic's is called at every step, with or without a critic

    def observed_update(self: Any, batch: Any, inputs: Any) -> Any:
        pairs = [(m.action_index, i) for part, of_part in zip(batch.microbatches, inputs, strict=True) for m, i in zip(part, of_part, strict=True)]
        seen["advantages"].append([(index, i.advantages) for index, i in pairs])
        if self.critic:
            seen["values"].append([(index, i.old_values) for index, i in pairs])
        return update_critic(self, batch, inputs)

    def observed_step(self: Any) -> Any:
        policy = run.learner.networks["policy"]
        if self is policy.optimizer:
            gradients.append(whole_gradients(self, policy.weights))
        return step(self)

    Learner.update_critic = observed_update  # type: ignore[method-assign]
    Optimizer.step = observed_step  # type: ignore[method-assign]
    with Run(config, "train", validate(config, "train", world_size)) as run:
        train_loop(run)
        weights = {name: tensor.clone() for name, tensor in run.learner.weights.tensors()}
        critic = {name: tensor.clone() for name, tensor in run.learner.critic.weights.tensors()} if run.learner.critic else {}
        lines = (config.trainer.output_dir / "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    return seen | {"gradients": gradients, "weights": weights, "critic": critic, "metrics": [json.loads(line) for line in lines]}


def whole_gradients(optimizer: Optimizer, weights: FullWeights) -> dict[str, Tensor]:
    """The gradients that the optimizer is about to use, under Hugging Face names, on rank 0. Collective over the world.

    A gradient has the shape of its parameter, so it takes its parameter's place for a moment and leaves by the weights' own description.
    """
    for chunk in optimizer.chunks:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if group.ddp_config.use_distributed_optimizer:  # each data-parallel rank holds the sum of its own part only
                replicas = group.intra_distributed_optimizer_instance_group
                for bucket in group.buckets:
                    parts = list(bucket.grad_data.chunk(replicas.size()))
                    dist.all_gather(parts, parts[replicas.rank()].clone(), group=replicas)
    parameters = [parameter for chunk in optimizer.chunks for parameter in chunk.parameters()]
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.main_grad)
        found = {name: tensor.clone() for name, tensor in weights.tensors()}
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Over all tensors, the largest norm of a difference relative to the norm of the tensor on the right."""
    assert left.keys() == right.keys()
    return max(_relative(float((left[name].double() - right[name].double()).norm()), float(right[name].double().norm())) for name in left)


def largest_metric_difference(left: dict[str, float], right: dict[str, float]) -> float:
    """Over all metrics of a step but the times, relative to the metric's own size on the right.

    Advantages and losses are sums of terms of either sign that cancel, so they are compared with the advantages' spread.
    """
    names = {name for name in right if not name.startswith("time/")}
    assert names == {name for name in left if not name.startswith("time/")}
    spread = right["advantages/std"]
    return max(_relative(abs(left[name] - right[name]), max(abs(right[name]), spread if name.startswith(("advantages/", "loss/")) else 0.0)) for name in names)


def _relative(difference: float, size: float) -> float:
    return difference / size if difference else 0.0
