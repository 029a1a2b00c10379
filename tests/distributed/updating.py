"""Single updates on gloo ranks from loss inputs made by hand, for tests of what one step does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otb_megatron.algorithms import action_weights
from otb_megatron.config import Aggregation
from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.optimizer import Optimizer
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch, distribute, gather_statistics, scatter_loss_inputs
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate
from otb_megatron.types import LossInputs, PolicyStatistics, Sample, Trajectories
from tests.distributed.launcher import run_ranks
from tests.distributed.training import whole_gradients


@dataclass(frozen=True)
class Update:
    """Samples and what their loss is made of. The advantage of every action of a sample is its reward."""

    samples: list[Sample]
    aggregation: Aggregation = "token-mean"
    masked: frozenset[int] = frozenset()  # samples whose correction weight is zero


@dataclass(frozen=True)
class Updated:
    """What the updates did."""

    statistics: list[PolicyStatistics]  # [update], of all actions, before it
    gradients: list[dict[str, Tensor]]  # [update with actions], under Hugging Face names
    metrics: list[dict[str, float]]  # [update]
    weights: dict[str, Tensor]  # after the last update


def apply(values: dict[str, Any], world_size: int, updates: list[Update], *, timeout_s: float = 240) -> Updated:
    """Applies the updates one after the other on `world_size` ranks."""
    return run_ranks(_apply_rank, world_size, values, updates, timeout_s=timeout_s)[0]


def _apply_rank(rank: int, world_size: int, values: dict[str, Any], updates: list[Update]) -> Updated | None:
    config = validate_config(values, "test")
    statistics, gradients, metrics = [], [], []
    step = Optimizer.step

    def observed_step(self: Any) -> Any:
        gradients.append(whole_gradients(self, run.learner.weights))
        return step(self)

    Optimizer.step = observed_step  # type: ignore[method-assign]
    with Run(config, "train", validate(config, "train", world_size)) as run:
        for update in updates:
            trajectories = Trajectories.from_samples(update.samples) if run.driver.is_driver else None
            batch = distribute(trajectories, config, run.parallel, run.driver)
            policy = gather_statistics(batch, run.learner.statistics(batch), run.driver) if update.samples else None
            inputs = None
            if run.driver.is_driver:
                inputs = _loss_inputs(update, batch, torch.empty(0) if policy is None else policy.log_prob)
            found: Metrics = run.learner.update(batch, scatter_loss_inputs(batch, inputs, run.driver))
            statistics.append(policy)
            metrics.append(found.values())
        weights = {name: tensor.clone() for name, tensor in run.learner.weights.tensors()}
    return Updated(statistics, gradients, metrics, weights) if rank == 0 else None  # type: ignore[arg-type]


def _loss_inputs(update: Update, batch: Batch, log_prob: Tensor) -> LossInputs:
    assert batch.trajectories is not None
    offsets = batch.trajectories.action_offsets
    lengths = offsets.diff()
    kept = torch.tensor([float(sample not in update.masked) for sample in range(len(update.samples))])
    return LossInputs(
        old_log_prob=log_prob,
        advantages=torch.tensor([sample.reward for sample in update.samples]).repeat_interleave(lengths),
        weight=action_weights(offsets, update.aggregation, 14),
        correction=kept.repeat_interleave(lengths),
    )
