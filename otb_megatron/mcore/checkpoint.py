"""Training checkpoints through Megatron's dist_checkpointing, written so that a reader never sees half of one.

    <root>/step_00000040/   model, optimizer and schedule in Megatron's format, and state.json of the driver
    <root>/latest           the name of the newest complete checkpoint; moves last

Nothing in the trainer is random between steps (no dropout; sampling is seeded by step), so no generator state is saved.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException

from otb_megatron.mcore.model import Model
from otb_megatron.mcore.optimizer import Optimizer
from otb_megatron.types import UserError

_BYTES_PER_PARAMETER = 16  # float32 master weight and two moments, and the weight itself, rounded up


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint below `root`, or None. Raises UserError if `latest` names a directory that is not there."""
    pointer = root / "latest"
    if not pointer.is_file():
        return None
    directory = root / pointer.read_text().strip()
    if not (directory / "state.json").is_file():
        raise UserError(f"{pointer} names {directory}, which is not a complete checkpoint; restore it, or write the name of another step_* directory there")
    return directory


def read_state(directory: Path) -> dict[str, Any]:
    """The driver's state in a checkpoint."""
    return json.loads((directory / "state.json").read_text())


def check_space(model: Model, root: Path) -> None:
    """Refuses to begin a checkpoint that cannot fit. On the driver; not collective.

    Raises:
        UserError: naming what is needed and what is free.
    """
    root.mkdir(parents=True, exist_ok=True)
    parallel = model.parallel
    parameters = sum(parameter.numel() for chunk in model.chunks for parameter in chunk.parameters())
    needed = parameters * _BYTES_PER_PARAMETER * parallel.world_size // (parallel.dp_size * parallel.cp_size)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise UserError(
            f"a checkpoint needs about {needed / 2**30:.2f} GiB, but {root} has {free / 2**30:.2f} GiB free; "
            "free space there or set trainer.output_dir elsewhere"
        )


def save(root: Path, step: int, model: Model, optimizer: Optimizer, state: dict[str, Any], keep_last: int) -> Path:
    """Writes the checkpoint of `step`. Collective over the world.

    Args:
        state: the driver's own state, JSON values; used on rank 0 only.
        keep_last: how many complete checkpoints remain.

    Raises:
        UserError: if it cannot be written. The partial one is removed and the previous one is still the latest.
    """
    directory = root / f"step_{step:08d}"
    partial = root / f".{directory.name}.partial"
    if model.parallel.is_driver:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier(group=model.parallel.control)
    metadata = _metadata(model)
    try:
        dist_checkpointing.save(_sharded_state(model, optimizer, metadata, is_loading=False), str(partial), content_metadata=_saved_metadata(metadata))
        dist.barrier(group=model.parallel.control)
        if model.parallel.is_driver:
            _write_durably(partial / "state.json", json.dumps(state, indent=2) + "\n")
            shutil.rmtree(directory, ignore_errors=True)
            partial.rename(directory)
            _write_durably(root / "latest", directory.name + "\n")
            _prune(root, keep_last)
        dist.barrier(group=model.parallel.control)
    except (OSError, CheckpointingException, torch.distributed.checkpoint.CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        kept = latest(root)
        left = f"{kept} is still the latest" if kept else "no checkpoint was left"
        raise UserError(f"cannot write the checkpoint {directory}: {_cause(error)}; {left}") from error
    return directory


def load(directory: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Fills model (and optimizer and schedule, if given) from a checkpoint of any parallel layout. Collective over the world.

    Raises:
        UserError: if it is damaged or belongs to another model.
    """
    metadata = _metadata(model)
    try:
        state = dist_checkpointing.load(_sharded_state(model, optimizer, metadata, is_loading=True), str(directory))
    except (OSError, CheckpointingException, torch.distributed.checkpoint.CheckpointException, RuntimeError, KeyError) as error:
        raise UserError(f"cannot load the checkpoint {directory}: {_cause(error)}; is it a checkpoint of {model.hf.path}?") from error
    for number, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state[f"model{number}"], strict=True)
    if optimizer is not None:
        optimizer.megatron.load_state_dict(state["optimizer"])
        optimizer.schedule.load_state_dict(state["schedule"])


def _sharded_state(model: Model, optimizer: Optimizer | None, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    chunks = {f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(model.chunks)}
    state: dict[str, Any] = dict(chunks)
    if optimizer is not None:
        state["optimizer"] = optimizer.megatron.sharded_state_dict(chunks, is_loading=is_loading, metadata=metadata)
        state["schedule"] = optimizer.schedule.state_dict()
    return state


def _metadata(model: Model) -> dict[str, Any]:
    # Megatron's default sharding type of the distributed optimizer is no longer loadable; this one crosses every layout.
    return dict(
        distrib_optim_sharding_type="fully_reshardable",
        singleton_local_shards=False,
        chained_optim_avoid_prefix=True,
        dp_cp_group=model.parallel.groups.dp_cp,
    )


def _saved_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key != "dp_cp_group"}


def _write_durably(path: Path, text: str) -> None:
    """Replaces `path` at once, after its bytes have reached the disk."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _prune(root: Path, keep_last: int) -> None:
    complete = sorted(path for path in root.iterdir() if re.fullmatch(r"step_\d{8}", path.name))
    for old in complete[:-keep_last]:
        shutil.rmtree(old)


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain, in one line: Megatron wraps an OSError of a writer several times."""
    found: list[BaseException] = [error]
    while (inner := found[-1].__cause__ or found[-1].__context__) is not None and inner not in found:
        found.append(inner)
    system = [part for part in found if isinstance(part, OSError)]
    return str(system[-1] if system else found[-1]).strip().splitlines()[-1]
