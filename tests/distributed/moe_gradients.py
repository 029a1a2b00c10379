"""The gradient of one training step of an MoE model on gloo ranks, and the same one from transformers in float64, written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.config import validate as validate_config
from otb_megatron.data.packing import build_microbatch
from otb_megatron.mcore.head import StatisticsHead
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.objective import PolicyObjective
from otb_megatron.mcore.optimizer import Optimizer, build_optimizer
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import evaluate, train_step
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.driver import Driver
from otb_megatron.types import LossInputs, Prompt, Response, RoutedExperts, Sample, Trajectories
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from tests.models import VOCAB_SIZE

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 4, 2
PACKS = [[0, 3], [1, 2], [4], []]  # samples of each microbatch; the last one only fills the number up
LENGTHS = [(5, 9), (3, 12), (4, 7), (1, 4), (8, 6)]  # prompt and response tokens


@dataclass(frozen=True)
class Step:
    """What a step computed; both sides return it."""

    log_prob: Tensor  # [actions] before the step
    gradient: dict[str, Tensor]  # under Hugging Face names
    metrics: dict[str, float] = field(default_factory=dict)


def samples(*, recorded: bool, seed: int = 0) -> list[Sample]:
    """Random tokens; if `recorded`, random experts that have nothing to do with the model's own choice, but for the third sample, which has none."""
    draw = np.random.default_rng(seed)
    found = []
    for number, (prompt, response) in enumerate(LENGTHS):
        tokens = tuple(int(token) for token in draw.integers(2, VOCAB_SIZE, prompt + response))
        choices = np.array([[draw.permutation(NUM_EXPERTS)[:TOPK] for _ in range(NUM_LAYERS)] for _ in range(prompt + response - 1)], dtype=np.uint8)
        record = RoutedExperts.of(choices) if recorded and number != 2 else None
        answer = Response(tokens[prompt:], (-1.0,) * response, "", "stop", 0, record)
        found.append(Sample(Prompt(number, "test", (), tokens[:prompt], ""), answer, group=number, reward=0.0))
    return found


class _KeepsGradients(Optimizer):
    """Puts the gradients where the weights were, so that they can be read like them."""

    def step(self) -> float:
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.main_grad)
        return 0.0


def megatron_step(rank: int, world_size: int, values: dict[str, Any], found: list[Sample], packs: list[list[int]]) -> Step | None:
    """Mean negative log-likelihood over all actions; replica r of R has every R-th of `packs`, from the r-th on. On rank 0."""
    config = validate_config(values, "test")
    hf = load_model(config.model.path)
    parallel = start_parallel(config.parallel, seed=0, deadline_s=60)
    model = build_model(config, hf, parallel)
    load_weights(model, Checkpoint(hf.path))
    built = build_optimizer(model, config.optimizer, num_steps=1)
    optimizer = _KeepsGradients(built.chunks, built.megatron, built.schedule)
    driver = Driver(parallel)

    trajectories = Trajectories.from_samples(found)
    sequence_multiple = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
    total_multiple = config.parallel.tensor_model_parallel_size * sequence_multiple
    own = [
        build_microbatch(trajectories, pack, sequence_multiple=sequence_multiple, total_multiple=total_multiple, pad_token_id=0)
        for pack in packs[parallel.dp_rank :: parallel.dp_size]
    ]
    log_prob = torch.zeros(trajectories.num_actions)
    for of_rank in driver.gather("statistics", evaluate(model, list(optimizer.chunks), own, StatisticsHead(hf.vocab_size, 1.0))):
        for local in of_rank:
            log_prob[local.action_index] = local.output[0]
    count = trajectories.num_actions
    batches = [(m, LossInputs(torch.zeros(m.targets.numel()), torch.zeros(m.targets.numel()), torch.full((m.targets.numel(),), 1 / count))) for m in own]
    metrics = train_step(model, optimizer, batches, num_actions=count, objective=PolicyObjective("negative_log_likelihood"))
    merged = Metrics()
    for of_rank in driver.gather("metrics", metrics):
        merged.merge(of_rank)
    gradient = {name: tensor.clone() for name, tensor in FullWeights(model).tensors()}
    stop_parallel()
    return Step(log_prob, gradient, merged.values()) if rank == 0 else None


Penalty = Callable[[list[list[Tensor]]], Tensor]  # [layer][sample] -> router logits [tokens, experts] in, loss out


def transformers_step(model_dir: Path, found: Sequence[Sample], penalty: Penalty | None = None) -> Step:
    """The same in float64, one unpadded sample at a time, with the recorded experts put in place of the gate's choice.

    The weights of the chosen experts are the softmax over all experts, or over the chosen ones, which is what renormalising comes to.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager").eval()
    is_gpt_oss = model.config.model_type == "gpt_oss"
    logits: list[list[Tensor]] = [[] for _ in range(NUM_LAYERS)]
    record: list[Tensor | None] = [None]
    differs = [0, 0]

    def choose(layer: int, gate: torch.nn.Module, args: tuple[Tensor, ...], output: Any) -> tuple[Tensor, Tensor, Tensor]:
        scores = torch.nn.functional.linear(args[0].reshape(-1, args[0].shape[-1]), gate.weight, gate.bias if is_gpt_oss else None)
        logits[layer].append(scores)
        own = scores.topk(TOPK).indices
        chosen = own.clone()
        if record[0] is not None:
            forced = record[0][:, layer]
            chosen[: len(forced)] = forced
            differs[0] += sum(len(set(a) - set(b)) for a, b in zip(forced.tolist(), own.tolist(), strict=False))
            differs[1] += forced.numel()
        weights = scores.gather(1, chosen).softmax(-1) if is_gpt_oss or model.config.norm_topk_prob else scores.softmax(-1).gather(1, chosen)
        return scores, weights, chosen

    for number, layer in enumerate(model.model.layers):
        gate = layer.mlp.router if is_gpt_oss else layer.mlp.gate
        gate.register_forward_hook(lambda gate, args, output, number=number: choose(number, gate, args, output))
    log_prob = []
    for sample in found:
        prompt, response = sample.prompt.token_ids, sample.response.token_ids
        experts = sample.response.routed_experts
        record[0] = None if experts is None else torch.from_numpy(experts.array().astype(np.int64))
        rows = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        log_prob.append(rows.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0])
    joined = torch.cat(log_prob)
    loss = -joined.mean()
    if penalty is not None:
        loss = loss + penalty(logits)
    loss.backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if is_gpt_oss:
            gradient[name] = parameter.grad
        elif name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter.grad):
                gradient[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")], gradient[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = (
                    both.chunk(2)
                )
        elif name.endswith("experts.down_proj"):
            gradient |= {name.replace("down_proj", f"{expert}.down_proj.weight"): one for expert, one in enumerate(parameter.grad)}
        else:
            gradient[name] = parameter.grad
    disagreement = {"moe/router_disagreement": differs[0] / differs[1]} if differs[1] else {}
    return Step(joined.detach(), gradient, disagreement)


def difference(left: Step, right: Step) -> float:
    """The largest difference of a gradient, relative to the largest entry of its tensor, and of a log-prob."""
    assert left.gradient.keys() == right.gradient.keys()
    worst = 0.0
    for name, expected in right.gradient.items():
        scale = float(expected.abs().max())
        assert scale > 0 and math.isfinite(scale), name
        worst = max(worst, float((left.gradient[name] - expected).abs().max()) / scale)
    return max(worst, float((left.log_prob - right.log_prob).abs().max()))
