"""Passes without gradients and the training step, through Megatron-Core's pipeline schedules.

This is the one place that scales the loss. Per-action losses are summed under weights that the driver computed from global
counts before the first backward pass, Megatron sums gradients over ranks and microbatches, and divides once by the number of
actions of the whole optimizer step. The gradient therefore does not depend on microbatching, packing, DP, CP or PP.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from otb_megatron.mcore.attention import PackedSequences
from otb_megatron.mcore.head import LocalActions, OutputProcessor
from otb_megatron.mcore.model import Model
from otb_megatron.mcore.objective import Objective
from otb_megatron.mcore.optimizer import Optimizer
from otb_megatron.mcore.router import PackRouting, num_waiting, routers, routing, take_sums
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.types import LossInputs, Microbatch


@dataclass(frozen=True)
class LocalOutput:
    """A head's output for the actions whose predictions were made on this rank."""

    action_index: Tensor  # int64 [local actions], place in the step's [actions] arrays
    output: Tensor  # float32 [numbers an action, local actions], on the CPU


def evaluate(model: Model, chunks: list[torch.nn.Module], microbatches: list[Microbatch], head: OutputProcessor) -> list[LocalOutput]:
    """What `head` gives for every action, without gradients. Collective over the ranks of each model replica.

    Returns:
        One entry a microbatch where this rank holds the output layer and is the first of its tensor-parallel group; nothing elsewhere.
    """

    def forward(iterator: Iterator[tuple[Microbatch, None]], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        microbatch, _ = next(iterator)
        output, actions = run_chunk(model, chunk, microbatch, head)

        def collect(output: Tensor, non_loss_data: bool = True) -> LocalOutput:
            return LocalOutput(microbatch.action_index[actions.index.cpu()], output.cpu())

        return output, collect

    with torch.no_grad():
        collected = _run_schedule(model, chunks, forward, [(microbatch, None) for microbatch in microbatches], forward_only=True)
    return collected if model.parallel.is_last_stage and model.parallel.tp_rank == 0 else []


def train_step(model: Model, optimizer: Optimizer, batches: list[tuple[Microbatch, LossInputs]], *, num_actions: int, objective: Objective) -> Metrics:
    """One optimizer step. Collective over the world.

    Args:
        batches: this replica's microbatches with their loss inputs; the same number on every replica.
        num_actions: actions of the optimizer step over all replicas. With 0 nothing moves: no weight, no moment, no schedule.
        objective: what to minimise.

    Returns:
        This rank's share of the metrics; merge them over ranks.
    """
    metrics = Metrics()
    if num_actions == 0:
        return metrics
    head = objective.head(model)

    def forward(iterator: Iterator[tuple[Microbatch, LossInputs]], chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        microbatch, inputs = next(iterator)
        output, actions = run_chunk(model, chunk, microbatch, head)
        offsets = microbatch.action_offsets.to(output.device)
        return output, partial(_loss, inputs=_select(inputs, actions.index), offsets=offsets, num_actions=num_actions, objective=objective)

    if model.config.num_moe_experts:
        model.config.moe_grad_scale_func = _auxiliary_scale(model, optimizer, [microbatch for microbatch, _ in batches], num_actions)
    optimizer.zero_grad()
    collected = _run_schedule(model, optimizer.chunks, forward, batches, forward_only=False)
    grad_norm = optimizer.step()
    if model.parallel.is_last_stage and model.parallel.tp_rank == 0:
        for sums in collected:
            count = float(sums.pop("num_actions"))
            for name, total in sums.items():
                metrics.mean(name, float(total), count)
    for name, (total, count) in take_sums(optimizer.chunks).items():  # each rank routes tokens and layers of its own
        metrics.mean(objective.router_metrics + name, total, count)
    if model.parallel.is_driver:
        metrics.mean(f"{objective.optimizer_metrics}/grad_norm", grad_norm, 1)
        metrics.mean(f"{objective.optimizer_metrics}/lr", optimizer.learning_rate, 1)
    return metrics


def _auxiliary_scale(model: Model, optimizer: Optimizer, microbatches: list[Microbatch], num_actions: int) -> Callable[[], Tensor]:
    """Scale of the routers' auxiliary losses: they are sums over tokens, become means over the tokens of the optimizer step, and are divided by
    the number of actions like everything else. Collective over the data-parallel group.
    """
    num_tokens = torch.tensor(sum(int((~microbatch.is_padding).sum()) for microbatch in microbatches), device=model.parallel.device)
    if model.parallel.dp_size > 1:
        dist.all_reduce(num_tokens, group=model.parallel.groups.dp)
    # A new tensor at each call: Megatron keeps the first one and writes the later ones into it.
    return lambda: optimizer.megatron.scale_loss(num_actions / num_tokens.float())


def _loss(output: Tensor, *, inputs: LossInputs, offsets: Tensor, num_actions: int, objective: Objective) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron's loss function: (sum to differentiate, actions it stands for, detached sums for the metrics)."""
    terms = objective.terms(output, inputs, offsets)
    # The shares add up to the loss of the optimizer step; as means over actions, those of several steps average.
    sums = {name: (value.detach() * inputs.weight).sum() * num_actions for name, value in terms.weighted.items()}
    sums |= {name: value.detach().sum() for name, value in terms.averaged.items()}
    count = torch.tensor(inputs.weight.numel(), dtype=torch.int, device=output.device)
    return (terms.total * inputs.weight).sum() * num_actions, count, sums | {"num_actions": count}


def run_chunk(model: Model, chunk: torch.nn.Module, microbatch: Microbatch, head: OutputProcessor) -> tuple[Tensor, LocalActions]:
    """Runs one model chunk on one microbatch; on the last stage the output is the head's."""
    parallel, device = model.parallel, model.parallel.device
    pack = PackedSequences.of(microbatch, model.config, parallel.cp_size, parallel.cp_rank, device)
    actions = LocalActions.of(microbatch, parallel.groups, device)
    tokens, positions = (rows[pack.local_rows][None].to(device) for rows in (microbatch.tokens, microbatch.position_ids))
    with routing(chunk, _pack_routing(model, microbatch, pack)) if model.config.num_moe_experts else nullcontext():
        output = chunk(tokens, positions, None, packed_seq_params=pack, output_processor=head, output_processor_context=actions)
    return output, actions


def _pack_routing(model: Model, microbatch: Microbatch, pack: PackedSequences) -> PackRouting:
    rows, parallel = pack.local_rows, model.parallel
    if model.config.sequence_parallel:
        rows = rows.chunk(parallel.groups.tp.size())[parallel.tp_rank]
    return PackRouting.of(microbatch, rows, parallel.device, replays=not model.is_critic)  # the sampler recorded the policy's experts


def _run_schedule(model: Model, chunks: list[Any], forward: Any, batches: list[Any], *, forward_only: bool) -> list[Any]:
    run = get_forward_backward_func(pp_size=model.parallel.groups.pp.size(), vp_size=model.parallel.virtual_stages)
    iterators = [iter(batches) for _ in chunks]
    collected = run(
        forward_step_func=forward,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(batches),
        seq_length=batches[0][0].tokens.numel(),
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    assert not num_waiting(chunks), "routers were recomputed less often than they were called: they replayed other packs than theirs"
    return collected


def _select(inputs: LossInputs, index: Tensor) -> LossInputs:
    """The loss inputs of this rank's actions, on its device."""
    fields = {name: value if value is None else value.to(index.device)[index] for name, value in vars(inputs).items()}
    return LossInputs(**fields)


class ReferenceWeights:
    """A frozen copy of the policy's weights in host memory, swapped in to score the reference and out again."""

    def __init__(self, model: Model) -> None:
        self._parameters: list[Tensor] = list(itertools.chain.from_iterable(chunk.parameters() for chunk in model.chunks))
        # Not trained by the optimizer, but by Megatron where `megatron.moe_router_bias_update_rate` says so.
        self._parameters += [router.expert_bias for chunk in model.chunks for router in routers(chunk) if router.expert_bias is not None]
        self._frozen = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block the model computes with the frozen weights."""
        current = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        try:
            self._fill(self._frozen)
            yield
        finally:
            self._fill(current)

    @torch.no_grad()
    def _fill(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
