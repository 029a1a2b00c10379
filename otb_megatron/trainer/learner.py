"""The trained policy on all ranks: its statistics, its updates, and its weights on their way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
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
from otb_megatron.trainer.validate import Task
from otb_megatron.types import LossInputs
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.files import Checkpoint, write_checkpoint


class Learner:
    """Every method is collective over the world."""

    def __init__(self, config: Config, task: Task, hf: HuggingFaceModel, parallel: Parallel, driver: Driver) -> None:
        self._config, self._driver = config, driver
        self.model = build_model(config, hf, parallel)
        driver.together("loading the weights", lambda: load_weights(self.model, Checkpoint(hf.path)))
        self._reference = ReferenceWeights(self.model) if config.algorithm.kl_coef else None
        self._optimizer = build_optimizer(self.model, config)
        self.weights = FullWeights(self.model)
        # Demonstrations are not sampled: their likelihood is that of the plain softmax.
        self._objective = Objective.of(config) if task == "train" else dataclasses.replace(Objective.of(config), temperature=1.0)
        self._checkpoints = config.trainer.output_dir / "checkpoints"

    def statistics(self, batch: Batch) -> list[LocalStatistics]:
        """Of every action under the current weights."""
        # The same packs as in the update, so that the first ratio of new to old policy is exactly one.
        return statistics(self.model, list(self._optimizer.chunks), batch.all_microbatches, self._objective.temperature)

    def reference_statistics(self, batch: Batch) -> list[LocalStatistics] | None:
        """Of every action under the initial weights; None where no KL is configured."""
        if self._reference is None:
            return None
        with self._reference.in_place():
            return self.statistics(batch)

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

        def send(tensors: Iterator[tuple[str, Tensor]]) -> None:
            assert engines is not None
            engines.send_weights([TensorMetadata(*described) for described in self.weights.metadata()], tensors, version)

        stream_weights(self.weights, self._driver, "sending the weights to the engines", send)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Writes a checkpoint; `state` is the driver's."""
        state = state | {"use_distributed_optimizer": self._config.optimizer.use_distributed_optimizer}
        num_parameters = sum(math.prod(shape) for _, _, shape in self.weights.metadata()) if self._driver.is_driver else 0
        self._driver.run("making room for a checkpoint", lambda: checkpoint.begin(self._checkpoints, step, num_parameters))
        checkpoint.write(self._checkpoints, step, self.model, self._optimizer)
        self._driver.together("writing a checkpoint", lambda: None)
        self._driver.run("completing a checkpoint", lambda: checkpoint.complete(self._checkpoints, step, state, self._config.checkpoint.keep_last))

    def restore(self, directory: Path) -> None:
        """Continues from a checkpoint."""
        checkpoint.load(directory, self.model, self._optimizer)

    def export(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face model directory."""
        export_weights(self.weights, self._driver, self.model.hf.path, directory)


def stream_weights(weights: FullWeights, driver: Driver, what: str, consume: Callable[[Iterator[tuple[str, Tensor]]], None]) -> None:
    """Streams the whole weights to `consume` on the driver; if it fails, every rank ends with its error. Collective over the world.

    The other ranks send their shards whatever becomes of `consume`, so the driver takes them all before it tells.
    """
    failure: list[Exception] = []
    stream = weights.tensors()
    if driver.is_driver:
        try:
            consume(item for item in stream)
        except Exception as error:
            failure.append(error)
    for _ in stream:
        pass

    def announce() -> None:
        if failure:
            raise failure[0]

    driver.run(what, announce)


def export_weights(weights: FullWeights, driver: Driver, source: Path, directory: Path) -> None:
    """Writes a Hugging Face model directory, whose config and tokenizer are those of `source`. Collective over the world."""
    stream_weights(weights, driver, "the export", lambda tensors: write_checkpoint(directory, tensors, source=source, dtype=weights.dtype))
