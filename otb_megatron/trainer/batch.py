"""One step's samples on their way: from the driver to every rank as microbatches, statistics back, loss inputs out again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otb_megatron.config import Config
from otb_megatron.data.packing import build_microbatch, padded_length, schedule
from otb_megatron.mcore.few_rows import fewest_tokens
from otb_megatron.mcore.head import as_statistics
from otb_megatron.mcore.parallel import Parallel
from otb_megatron.mcore.step import LocalOutput
from otb_megatron.trainer.driver import Driver
from otb_megatron.types import LossInputs, Microbatch, PolicyStatistics, Trajectories

PAD_TOKEN_ID = 0  # any id of the vocabulary: nothing attends to padding and nothing is predicted from it


@dataclass(frozen=True)
class Part:
    """The samples of one optimizer step, as the driver sees them."""

    samples: Tensor  # int64 [samples of the part], ascending, into the Trajectories
    actions: Tensor  # int64 [actions of the part], ascending, into the [actions] arrays
    offsets: Tensor  # int64 [samples of the part + 1], of those actions
    microbatches: list[list[Microbatch]]  # [replica][microbatch]


@dataclass(frozen=True)
class Batch:
    """One step's samples as one rank sees them."""

    microbatches: list[list[Microbatch]]  # [part][microbatch], of this rank's model replica
    num_actions: list[int]  # [part], over all replicas
    parts: list[Part]  # on the driver; empty elsewhere
    trajectories: Trajectories | None  # on the driver; None elsewhere

    @property
    def all_microbatches(self) -> list[Microbatch]:
        """Those of every part, in order."""
        return [microbatch for part in self.microbatches for microbatch in part]


def distribute(trajectories: Trajectories | None, config: Config, parallel: Parallel, driver: Driver) -> Batch:
    """Cuts the samples into one part per optimizer step, packs each part for the whole world and sends every replica its microbatches.

    Collective. The driver passes the samples, the others None.
    """
    parts = driver.run("packing", lambda: _parts(trajectories, config, parallel)) or []  # type: ignore[arg-type]
    replicas = [([part.microbatches[replica] for part in parts], [part.actions.numel() for part in parts]) for replica in range(parallel.dp_size)]
    microbatches, num_actions = driver.scatter("the packed samples", replicas if parallel.is_driver else None)
    return Batch(microbatches, num_actions, parts, trajectories)


def gather_statistics(batch: Batch, local: list[LocalOutput], driver: Driver) -> PolicyStatistics | None:
    """Statistics of all actions, in the order of the Trajectories, on the driver; None elsewhere. Collective."""
    gathered = _gather(batch, local, driver)
    return None if gathered is None else as_statistics(gathered)


def gather_values(batch: Batch, local: list[LocalOutput], driver: Driver) -> Tensor | None:
    """[actions] the critic's values, in the order of the Trajectories, on the driver; None elsewhere. Collective."""
    gathered = _gather(batch, local, driver)
    return None if gathered is None else gathered[0]


def scatter_loss_inputs(batch: Batch, inputs: LossInputs | None, driver: Driver) -> list[list[LossInputs]]:
    """Gives every rank the loss inputs of its microbatches, [part][microbatch]. Collective; the driver passes those of all actions."""
    replicas = None
    if inputs is not None:
        replicas = [
            [[_select(inputs, microbatch.action_index) for microbatch in part.microbatches[replica]] for part in batch.parts]
            for replica in range(max(driver.replica_of_rank) + 1)
        ]
    return driver.scatter("the loss inputs", replicas)


def _gather(batch: Batch, local: list[LocalOutput], driver: Driver) -> Tensor | None:
    """[numbers an action, actions] on the driver; None elsewhere."""
    gathered = driver.gather("what the model says of the actions", local)
    if not driver.is_driver:
        return None
    assert batch.trajectories is not None
    found = [entry for of_rank in gathered for entry in of_rank]
    index = torch.cat([entry.action_index for entry in found])
    if index.numel() != batch.trajectories.num_actions or index.unique().numel() != index.numel():
        raise RuntimeError(f"outputs of {index.numel()} actions came back for {batch.trajectories.num_actions}; each action must come once")
    outputs = torch.cat([entry.output for entry in found], dim=1)
    ordered = torch.empty_like(outputs)
    ordered[:, index] = outputs
    return ordered


def _parts(trajectories: Trajectories, config: Config, parallel: Parallel) -> list[Part]:
    groups = trajectories.group.unique()
    sequence_multiple = 2 * parallel.cp_size if parallel.cp_size > 1 else 1
    total_multiple = config.parallel.tensor_model_parallel_size * sequence_multiple
    fewest = fewest_tokens(parallel, config.parallel.tensor_model_parallel_size)
    lengths = trajectories.token_offsets.diff().tolist()
    equally_long = config.megatron.get("moe_token_dispatcher_type") == "allgather"  # it takes as many tokens from every rank
    parts = []
    for members in groups.tensor_split(config.algorithm.optimizer_steps_per_rollout):
        samples = torch.isin(trajectories.group, members).nonzero().flatten()
        padded = [padded_length(lengths[sample], sequence_multiple) for sample in samples.tolist()]
        packed = schedule(
            padded,
            num_replicas=parallel.dp_size,
            max_tokens=config.trainer.max_tokens_per_microbatch,
            # Megatron's interleaved schedule wants a multiple of the number of stages.
            divisor=config.parallel.pipeline_model_parallel_size if parallel.virtual_stages else 1,
        )
        longest = [max(sum(padded[index] for index in pack) for pack in packs) for packs in zip(*packed, strict=True)]
        microbatches = [
            [
                build_microbatch(
                    trajectories,
                    samples[indices].tolist(),
                    sequence_multiple=sequence_multiple,
                    total_multiple=total_multiple,
                    pad_token_id=PAD_TOKEN_ID,
                    min_tokens=max(fewest, tokens if equally_long else 0),
                )
                for indices, tokens in zip(replica, longest, strict=True)
            ]
            for replica in packed
        ]
        counts = trajectories.action_offsets.diff()[samples]
        bounds = zip(trajectories.action_offsets[samples], trajectories.action_offsets[samples + 1], strict=True)
        actions = torch.cat([torch.empty(0, dtype=torch.int64), *(torch.arange(first, last) for first, last in bounds)])  # a part may be empty
        parts.append(Part(samples, actions, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]), microbatches))
    return parts


def _select(inputs: LossInputs, index: Tensor) -> LossInputs:
    return LossInputs(**{name: None if value is None else value[index] for name, value in vars(inputs).items()})
