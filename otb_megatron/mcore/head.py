"""What stands on GPTModel's hidden states: statistics of the policy, or a critic's values. No logits in between.

Both are GPTModel `output_processor`s whose context says where the actions of the microbatch are predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from otb_megatron.mcore.few_rows import missing_rows
from otb_megatron.ops.context_parallel import local_rows
from otb_megatron.ops.statistics import IGNORED_TARGET, policy_statistics
from otb_megatron.types import Microbatch, PolicyStatistics

OutputProcessor = Callable[..., Tensor]  # gives [numbers an action, local actions], the same on every tensor-parallel rank


@dataclass(frozen=True)
class LocalActions:
    """The actions of a microbatch that this context-parallel rank predicts."""

    rows: Tensor  # int64 [local actions], rows of this rank's hidden states
    targets: Tensor  # int64 [local actions]
    index: Tensor  # int64 [local actions], where each stands among the microbatch's actions
    groups: ProcessGroupCollection

    @classmethod
    def of(cls, microbatch: Microbatch, groups: ProcessGroupCollection, device: torch.device) -> LocalActions:
        """Keeps the actions whose predicting row lies on this context-parallel rank."""
        rows, index = microbatch.action_rows, torch.arange(microbatch.action_rows.numel())
        if groups.cp.size() > 1:
            own = local_rows(microbatch.cu_seqlens, groups.cp.size(), groups.cp.rank())
            local = torch.full((microbatch.tokens.numel(),), -1)
            local[own] = torch.arange(own.numel())
            rows = local[rows]
            index = torch.nonzero(rows >= 0).flatten()
            rows = rows[index]
        return cls(rows.to(device), microbatch.targets[index].to(device), index.to(device), groups)


@dataclass(frozen=True)
class StatisticsHead:
    """The policy's output: what `as_statistics` names."""

    vocab_size: int
    temperature: float
    entropy_grad: bool = False

    def __call__(self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: LocalActions, config: Any, **_: Any) -> Tensor:
        """GPTModel's `output_processor`.

        Args:
            hidden_states: [tokens / cp, 1, hidden], or [tokens / cp / tp, 1, hidden] under sequence parallelism.
            output_weight: the shared embedding weight of a tied model; None: the output layer's own.

        Returns:
            float32 [3, local actions]: log_prob, entropy and rest. Entropy has a gradient only if asked for.
        """
        tp = context.groups.tp
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=tp)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=tp)
        missing = missing_rows(context.rows)
        statistics = policy_statistics(
            hidden.squeeze(1).index_select(0, F.pad(context.rows, (0, missing))),
            output_layer.weight if output_weight is None else output_weight,
            F.pad(context.targets, (0, missing), value=IGNORED_TARGET),
            vocab_size=self.vocab_size,
            group=tp if tp.size() > 1 else None,
            temperature=self.temperature,
            entropy_grad=self.entropy_grad,
            accumulate_into_main_grad=config.gradient_accumulation_fusion,
        )
        return torch.stack([statistics.log_prob, statistics.entropy, statistics.rest])[:, : context.rows.numel()]


def as_statistics(output: Tensor) -> PolicyStatistics:
    """The rows of a StatisticsHead's output by name."""
    log_prob, entropy, rest = output
    return PolicyStatistics(log_prob, entropy, rest)


class ValueLayer(torch.nn.Module):
    """The critic's output layer, hidden -> 1, on every tensor-parallel rank. It starts at zero: no value is known yet.

    Parameters have the model's dtype (float32 masters are the optimizer's); the product is computed in float32.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in (self.weight, self.bias):
            # Under sequence parallelism a rank's gradient is that of its own rows; finalize_model_grads sums what has this mark over the group.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [tokens, 1, hidden_size] -> float32 [tokens]."""
        return torch.nn.functional.linear(hidden.squeeze(1).float(), self.weight.float(), self.bias.float()).squeeze(1)


def value_output(*, hidden_states: Tensor, output_layer: ValueLayer, context: LocalActions, config: Any, **_: Any) -> Tensor:
    """GPTModel's `output_processor` of a critic: float32 [1, local actions], the value of the state before each action.

    The row that predicts an action has seen everything before it and not the action itself, so its value is V(s_t), the baseline that the
    action must not be able to move.

    Args:
        hidden_states: [tokens / cp, 1, hidden], or [tokens / cp / tp, 1, hidden] under sequence parallelism.
    """
    values = output_layer(hidden_states)
    if config.sequence_parallel:
        # One number a token is gathered instead of its hidden state. What follows is the same on every rank, so backward takes this rank's slice.
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=context.groups.tp)
    return values.index_select(0, context.rows)[None]
