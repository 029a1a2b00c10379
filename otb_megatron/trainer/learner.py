"""The trained policy on all ranks: its statistics, its updates, and its weights on their way out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.optimizer import build_optimizer
from otb_megatron.mcore.parallel import Parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import LocalStatistics, Objective, ReferenceWeights, statistics, train_step
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.source import Engines
from otb_megatron.types import LossInputs
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.files import Checkpoint, write_checkpoint


class Learner:
    """Every method is collective over the world."""

    def __init__(self, config: Config, hf: HuggingFaceModel, parallel: Parallel, driver: Driver) -> None:
        self._config, self._parallel, self._driver = config, parallel, driver
        self.model = build_model(config, hf, parallel)
        driver.together("loading the weights", lambda: load_weights(self.model, Checkpoint(hf.path)))
        self._reference = ReferenceWeights(self.model) if config.algorithm.kl_coef else None
        self._optimizer = build_optimizer(self.model, config)
        self._weights = FullWeights(self.model)
        self._objective = Objective.of(config)
        self._checkpoints = config.trainer.output_dir / "checkpoints"

    def statistics(self, batch: Batch) -> list[LocalStatistics]:
        """Of every action under the current weights."""
        return self._statistics(batch)

    def reference_statistics(self, batch: Batch) -> list[LocalStatistics] | None:
        """Of every action under the initial weights; None where no KL is configured."""
        if self._reference is None:
            return None
        with self._reference.in_place():
            return self._statistics(batch)

    def _statistics(self, batch: Batch) -> list[LocalStatistics]:
        # The same packs as in the update, so that the first ratio of new to old policy is exactly one.
        microbatches = [microbatch for part in batch.microbatches for microbatch in part]
        return statistics(self.model, list(self._optimizer.chunks), microbatches, self._objective.temperature)

    def update(self, batch: Batch, inputs: list[list[LossInputs]]) -> Metrics:
        """One optimizer step a part. Returns the metrics of all ranks on the driver and this rank's own elsewhere."""
        metrics = Metrics()
        for microbatches, of_part, num_actions in zip(batch.microbatches, inputs, batch.num_actions, strict=True):
            pairs = list(zip(microbatches, of_part, strict=True))
            metrics.merge(train_step(self.model, self._optimizer, pairs, num_actions=num_actions, objective=self._objective))
        gathered = self._driver.gather("the metrics", metrics)
        merged = Metrics()
        for of_rank in gathered or [metrics]:
            merged.merge(of_rank)
        return merged

    def publish(self, engines: Engines | None, version: int) -> None:
        """Sends the weights to the rollout engines, which only the driver has."""
        if engines is None:
            _exhaust(self._weights.tensors())
        else:
            metadata = [TensorMetadata(name, dtype, shape) for name, dtype, shape in self._weights.metadata()]
            engines.send_weights(metadata, self._weights.tensors(), version)

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Writes a checkpoint; `state` is the driver's."""
        self._driver.run("checking the space for a checkpoint", lambda: checkpoint.check_space(self.model, self._checkpoints))
        return checkpoint.save(self._checkpoints, step, self.model, self._optimizer, state, self._config.checkpoint.keep_last)

    def restore(self, directory: Path) -> None:
        """Continues from a checkpoint."""
        checkpoint.load(directory, self.model, self._optimizer)

    def export(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face model directory."""
        if not self._parallel.is_driver:
            _exhaust(self._weights.tensors())
            return
        write_checkpoint(directory, self._weights.tensors(), source=self.model.hf.path, dtype=self._weights.dtype)


def _exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    for _ in tensors:
        raise AssertionError("only the driver receives weights")
