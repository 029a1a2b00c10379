"""Training checkpoints through Megatron's dist_checkpointing, written so that a reader never sees half of one.

    <root>/step_00000040/   a directory a network (`policy`, `critic`) with model, optimizer and schedule in Megatron's format, and state.json of the driver
    <root>/latest           the name of the newest complete checkpoint; moves last

Nothing in the trainer is random between steps (no dropout), so no generator state is saved. The engines' random state starts anew
with them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
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


def begin(root: Path, step: int, num_parameters: dict[str, int]) -> None:
    """Makes room for the checkpoint of `step`. On the driver; not collective.

    Args:
        num_parameters: of each whole network, by name.

    Raises:
        UserError: it cannot fit (naming what is needed and what is free), or `root` cannot be written.
    """
    needed = sum(num_parameters.values()) * _BYTES_PER_PARAMETER
    try:
        root.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(root).free
        partial = _partial(root, step)
        shutil.rmtree(partial, ignore_errors=True)
        for name in num_parameters:
            (partial / name).mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write checkpoints to {root}: {error}; set trainer.output_dir elsewhere") from error
    if free < needed:
        raise UserError(
            f"a checkpoint needs about {needed / 2**30:.2f} GiB, but {root} has {free / 2**30:.2f} GiB free; "
            "free space there or set trainer.output_dir elsewhere"
        )


def write(root: Path, step: int, networks: dict[str, tuple[Model, Optimizer]]) -> None:
    """Writes the tensors beside the earlier checkpoints. Collective over the world.

    Args:
        networks: those that `begin` was told of.

    Raises:
        UserError: the disk does not take them. The partial checkpoint is removed and the previous one is still the latest.
    """
    partial = _partial(root, step)
    try:
        for name, (model, optimizer) in networks.items():
            metadata = _metadata(model)
            state = _sharded_state(model, optimizer, metadata, is_loading=False)
            dist_checkpointing.save(state, str(partial / name), content_metadata=_saved_metadata(metadata))
    except (OSError, CheckpointingException, torch.distributed.checkpoint.CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(root, step, error) from error


def complete(root: Path, step: int, state: dict[str, Any], keep_last: int) -> Path:
    """Makes what `write` wrote the latest checkpoint. On the driver, after all ranks have written; not collective.

    Args:
        state: the driver's own state, JSON values.
        keep_last: how many complete checkpoints remain. Those of later steps, from before a return to an earlier one, go in any case.
    """
    directory, partial = root / f"step_{step:08d}", _partial(root, step)
    try:
        _write_durably(partial / "state.json", json.dumps(state, indent=2) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
        _write_durably(root / "latest", directory.name + "\n")
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(root, step, error) from error
    found = sorted(path.name for path in root.iterdir() if re.fullmatch(r"step_\d{8}", path.name))
    kept = [name for name in found if name <= directory.name][-keep_last:]
    for name in set(found) - set(kept):
        shutil.rmtree(root / name)
    return directory


def _partial(root: Path, step: int) -> Path:
    return root / f".step_{step:08d}.partial"


def _write_error(root: Path, step: int, error: BaseException) -> UserError:
    kept = latest(root)
    left = f"{kept} is still the latest" if kept else "no checkpoint was left"
    return UserError(f"cannot write the checkpoint of step {step} to {root}: {_cause(error)}; {left}")


def load(directory: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Fills model (and optimizer and schedule, if given) from a network of a checkpoint of any parallel layout. Collective over the world.

    Args:
        directory: the network's, e.g. `step_00000040/policy`.

    Raises:
        UserError: if it is damaged or belongs to another model.
    """
    metadata = _metadata(model)
    try:
        state = dist_checkpointing.load(_sharded_state(model, optimizer, metadata, is_loading=True), str(directory))
    except (OSError, EOFError, CheckpointingException, torch.distributed.checkpoint.CheckpointException, RuntimeError, KeyError) as error:
        raise UserError(f"cannot load the checkpoint {directory}: {_cause(error)}; it is damaged, or not one of {model.hf.path}") from error
    for number, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state[f"model{number}"], strict=True)
    if optimizer is not None:
        _set_rates(state["optimizer"], optimizer)
        optimizer.megatron.load_state_dict(state["optimizer"])
        optimizer.schedule.load_state_dict(state["schedule"])


def _set_rates(saved: Any, optimizer: Optimizer) -> None:
    """Gives the saved parameter groups the learning rates of this run, which may differ: Megatron finds a group by them, among others."""
    if isinstance(saved, dict):
        if "max_lr" in saved and "min_lr" in saved:
            saved.update(max_lr=optimizer.schedule.max_lr, min_lr=optimizer.schedule.min_lr)
        saved = list(saved.values())
    if isinstance(saved, list):
        for part in saved:
            _set_rates(part, optimizer)


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


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain, in one line: Megatron wraps an OSError of a writer several times."""
    found: list[BaseException] = [error]
    while (inner := found[-1].__cause__ or found[-1].__context__) is not None and inner not in found:
        found.append(inner)
    system = [part for part in found if isinstance(part, OSError)]
    return str(system[-1] if system else found[-1]).strip().splitlines()[-1]
