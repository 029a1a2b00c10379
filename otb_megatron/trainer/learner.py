"""What is trained, on all ranks: statistics and values, updates, checkpoints, and the policy's weights on their way out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint, checksums
from otb_megatron.mcore.model import Model, build_model
from otb_megatron.mcore.objective import Objective, PolicyObjective, ValueObjective
from otb_megatron.mcore.optimizer import Optimizer, build_optimizer
from otb_megatron.mcore.parallel import Parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import LocalOutput, ReferenceWeights, evaluate, train_step
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.telemetry.console import count_down_bytes
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.source import Engines
from otb_megatron.trainer.validate import Task, TrainedNetwork, load_critic, trained_networks
from otb_megatron.types import LossInputs
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint


class Network:
    """A model under training: with its optimizer and what it minimises. Building it and every method is collective over the world."""

    def __init__(self, model: Model, training: TrainedNetwork, objective: Objective, driver: Driver) -> None:
        self.model, self.settings = model, training.optimizer
        self._objective, self._driver = objective, driver
        self.optimizer = build_optimizer(model, training.optimizer, training.num_steps)
        self.weights = FullWeights(model)

    def evaluate(self, batch: Batch) -> list[LocalOutput]:
        """What the objective reads of every action, under the current weights and without gradients."""
        # The same packs as in the update, so that the first ratio of new to old policy is exactly one.
        return evaluate(self.model, list(self.optimizer.chunks), batch.all_microbatches, self._objective.head(self.model))

    def update(self, batch: Batch, inputs: list[list[LossInputs]]) -> Metrics:
        """One optimizer step a part. Returns the metrics of all ranks on the driver and this rank's own elsewhere."""
        metrics = Metrics()
        for microbatches, of_part, num_actions in zip(batch.microbatches, inputs, batch.num_actions, strict=True):
            pairs = list(zip(microbatches, of_part, strict=True))
            metrics.merge(train_step(self.model, self.optimizer, pairs, num_actions=num_actions, objective=self._objective))
        gathered = self._driver.gather("the metrics", metrics)
        merged = Metrics()
        for of_rank in gathered or [metrics]:
            merged.merge(of_rank)
        return merged


class Learner:
    """The policy and, where the estimator needs values, a critic. Every method but `close` is collective over the world."""

    def __init__(self, config: Config, task: Task, hf: HuggingFaceModel, parallel: Parallel, driver: Driver, imported: Path | None = None) -> None:
        """`imported`: the checkpoint of an import, to take the policy's weights from instead of from `hf`'s directory."""
        self._config, self._driver = config, driver
        # Demonstrations are not sampled: their likelihood is that of the plain softmax.
        objective = PolicyObjective.of(config) if task == "train" else dataclasses.replace(PolicyObjective.of(config), temperature=1.0)
        self.model = build_model(config, hf, parallel)
        if imported is None:
            driver.together("loading the weights", lambda: load_weights(self.model, Checkpoint(hf.path)))
        else:  # before an optimizer is built around them: it copies them
            restore(imported, {"policy": (self.model, None)}, driver)
        self._reference = ReferenceWeights(self.model) if config.algorithm.kl_coef or config.algorithm.reward_kl else None
        networks = trained_networks(config, task)
        self._policy = Network(self.model, networks["policy"], objective, driver)
        self.weights = self._policy.weights
        self.networks = {"policy": self._policy}  # what is trained and saved, by name
        if "critic" in networks:
            critic = build_model(config, load_critic(config), parallel, is_critic=True)
            driver.together("loading the critic's weights", lambda: load_weights(critic, Checkpoint(critic.hf.path)))
            self.networks["critic"] = Network(critic, networks["critic"], ValueObjective(config.critic.cliprange_value), driver)
        self.checkpoints = config.trainer.output_dir / "checkpoints"

    @property
    def critic(self) -> Network | None:
        return self.networks.get("critic")

    @property
    def identity(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint and the run that continues it must have in common, by network."""
        return {
            name: {"use_distributed_optimizer": network.settings.use_distributed_optimizer, "model": checkpoint.identity(network.model.hf)}
            for name, network in self.networks.items()
        }

    def statistics(self, batch: Batch) -> list[LocalOutput]:
        """Of every action under the current weights."""
        return self._policy.evaluate(batch)

    def reference_statistics(self, batch: Batch) -> list[LocalOutput] | None:
        """Of every action under the initial weights; None where no KL is configured."""
        if self._reference is None:
            return None
        with self._reference.in_place():
            return self.statistics(batch)

    def values(self, batch: Batch) -> list[LocalOutput] | None:
        """The critic's value of the state before every action; None where there is no critic."""
        return self.critic.evaluate(batch) if self.critic else None

    def update(self, batch: Batch, inputs: list[list[LossInputs]]) -> Metrics:
        """Trains the policy; see `Network.update`."""
        return self._policy.update(batch, inputs)

    def update_critic(self, batch: Batch, inputs: list[list[LossInputs]]) -> Metrics:
        """Trains the critic on the same parts; nothing where there is none."""
        return self.critic.update(batch, inputs) if self.critic else Metrics()

    def publish(self, engines: Engines | None, version: int) -> None:
        """Sends the weights to the rollout engines, which only the driver has."""

        def send(tensors: Iterator[tuple[str, Tensor]]) -> None:
            assert engines is not None
            engines.send_weights([TensorMetadata(*described) for described in self.weights.metadata()], tensors, version)

        stream_weights(self.weights, self._driver, "sending the weights to the engines", send)

    def start_save(self, step: int) -> checkpoint.Writing:
        """Writes the tensors of every network, or starts to with `checkpoint.async_save`. The checkpoint before must be complete."""
        sizes = {name: network.weights.num_parameters for name, network in self.networks.items()}
        self._driver.run("making room for a checkpoint", lambda: checkpoint.begin(self.checkpoints, step, sizes))
        networks = {name: (network.model, network.optimizer) for name, network in self.networks.items()}
        return checkpoint.write(self.checkpoints, step, networks, in_background=self._config.checkpoint.async_save)

    def complete_save(self, writing: checkpoint.Writing, state: dict[str, Any], *, is_best: bool) -> None:
        """Waits for the tensors and makes the checkpoint the latest; `state` is the driver's at the time of `start_save`."""
        complete_save(self.checkpoints, writing, state, self._driver, keep_last=self._config.checkpoint.keep_last, is_best=is_best)

    def restore(self, directory: Path) -> None:
        """Continues from a checkpoint."""
        restore(directory, {name: (network.model, network.optimizer) for name, network in self.networks.items()}, self._driver)

    def close(self) -> None:
        """Lets the networks go, so that another run in the same process has their memory."""
        for network in self.networks.values():
            network.optimizer.close()

    def export(self, directory: Path) -> None:
        """Writes the policy as a Hugging Face model directory."""
        export_weights(self.weights, self._driver, self.model.hf.path, directory)


def complete_save(root: Path, writing: checkpoint.Writing, state: dict[str, Any], driver: Driver, *, keep_last: int, is_best: bool = False) -> None:
    """Waits for the tensors on all ranks and makes the checkpoint the latest; arguments as for `checkpoint.complete`. Collective over the world."""
    writing.finish()
    found = driver.gather("the checksums", driver.together("writing a checkpoint", writing.checksums))
    files = {name: checksum for of_rank in found for name, checksum in of_rank.items()}
    driver.run("completing a checkpoint", lambda: checkpoint.complete(root, writing.step, state, files, keep_last=keep_last, is_best=is_best))


def restore(directory: Path, networks: dict[str, tuple[Model, Optimizer | None]], driver: Driver) -> None:
    """Fills networks, by name, from a checkpoint whose files are first compared with their checksums. Collective over the world."""
    driver.together("checking the checkpoint", lambda: checksums.check(directory, driver.rank, driver.world_size))
    for name, (model, optimizer) in networks.items():
        checkpoint.load(directory / name, model, optimizer)


def stream_weights(weights: FullWeights, driver: Driver, what: str, consume: Callable[[Iterator[tuple[str, Tensor]]], None], first: int = 0) -> None:
    """Streams the whole weights to `consume` on the driver; if it fails, every rank ends with its error. Collective over the world.

    The other ranks send their shards whatever becomes of `consume`, so the driver takes them all before it tells.

    Args:
        first: number of the first tensor to stream.
    """
    failure: list[Exception] = []
    stream = weights.tensors(first)
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


def export_weights(weights: FullWeights, driver: Driver, source: Path, directory: Path, *, identity: Any = None, show_progress: bool = False) -> None:
    """Writes a Hugging Face model directory, whose config and tokenizer are those of `source`. Collective over the world.

    Args:
        identity: as `weights.export.Export` takes it; the driver's counts.
    """
    export = driver.run("preparing the export", lambda: Export(directory, weights.metadata(), source=source, dtype=weights.dtype, identity=identity))
    first = driver.share("what an interrupted export has written", export.num_done if export else 0)

    def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
        assert export is not None
        export.write(tensors, count_down_bytes(export.total_bytes, show=show_progress))

    stream_weights(weights, driver, "the export", write, first)
