"""The policy statistics head inside GPTModel: hidden states in, statistics of this rank's actions out, no logits in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from otb_megatron.ops.context_parallel import local_rows
from otb_megatron.ops.statistics import policy_statistics
from otb_megatron.types import Microbatch, PolicyStatistics


@dataclass(frozen=True)
class Head:
    """What GPTModel's `output_processor` is told about one microbatch."""

    rows: Tensor  # int64 [local actions], rows of this context-parallel rank's hidden states
    targets: Tensor  # int64 [local actions]
    index: Tensor  # int64 [local actions], where each stands among the microbatch's actions
    groups: ProcessGroupCollection
    vocab_size: int
    temperature: float
    entropy_grad: bool

    @classmethod
    def of(
        cls, microbatch: Microbatch, groups: ProcessGroupCollection, *, vocab_size: int, temperature: float, entropy_grad: bool, device: torch.device
    ) -> Head:
        """Keeps the actions whose predicting row lies on this context-parallel rank."""
        rows, index = microbatch.action_rows, torch.arange(microbatch.action_rows.numel())
        if groups.cp.size() > 1:
            own = local_rows(microbatch.cu_seqlens, groups.cp.size(), groups.cp.rank())
            local = torch.full((microbatch.tokens.numel(),), -1)
            local[own] = torch.arange(own.numel())
            rows = local[rows]
            index = torch.nonzero(rows >= 0).flatten()
            rows = rows[index]
        return cls(rows.to(device), microbatch.targets[index].to(device), index.to(device), groups, vocab_size, temperature, entropy_grad)


def statistics_output(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: Head, config: Any, **_: Any) -> Tensor:
    """GPTModel's `output_processor`.

    Args:
        hidden_states: [tokens / cp, 1, hidden], or [tokens / cp / tp, 1, hidden] under sequence parallelism.
        output_weight: the shared embedding weight of a tied model; None: the output layer's own.

    Returns:
        float32 [3, local actions]: log_prob, entropy and rest, the same on every tensor-parallel rank. Entropy has a gradient only if asked for.
    """
    tp = context.groups.tp
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=tp)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden_states, group=tp)
    statistics = policy_statistics(
        hidden.squeeze(1).index_select(0, context.rows),
        output_layer.weight if output_weight is None else output_weight,
        context.targets,
        vocab_size=context.vocab_size,
        group=tp if tp.size() > 1 else None,
        temperature=context.temperature,
        entropy_grad=context.entropy_grad,
        accumulate_into_main_grad=config.gradient_accumulation_fusion,
    )
    return torch.stack([statistics.log_prob, statistics.entropy, statistics.rest])


def as_statistics(output: Tensor) -> PolicyStatistics:
    """The rows of `statistics_output` by name."""
    log_prob, entropy, rest = output
    return PolicyStatistics(log_prob, entropy, rest)
