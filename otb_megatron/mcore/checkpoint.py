"""Training checkpoints through Megatron's dist_checkpointing, written so that a reader never sees half of one.

    <root>/step_00000040/   a directory a network (`policy`, `critic`) with model, optimizer and schedule in Megatron's format (of an
                            import the policy's model alone), state.json of the driver, checksums.json of every file
    <root>/best             the name of the checkpoint with the highest held-out accuracy, where one is kept
    <root>/latest           the name of the newest complete checkpoint; moves last

A checkpoint is written into a hidden directory and renamed when it is complete. Nothing in the trainer is random between steps (no
dropout), so no generator state is saved. The engines' random state starts anew with them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, apply_factories
from torch import Tensor

from otb_megatron.mcore.checksums import CHECKSUMS_FILE, Checksum, checksums
from otb_megatron.mcore.model import Model
from otb_megatron.mcore.optimizer import Optimizer
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.durable import sync, write_durably
from otb_megatron.weights.files import read_object

FORMAT_VERSION = 1  # of the directory as a whole; goes up when a program of an older version could not continue from it

_BYTES_PER_PARAMETER = 16  # float32 master weight and two moments, and the weight itself, rounded up
_BYTES_PER_WEIGHT = 4  # alone; rounded up too
_STATE_FILE = "state.json"
_STEP_NAME = re.compile(r"step_\d{8}")  # of a whole checkpoint
_FIRST = "latest.partial"  # names the first checkpoint before it is there, so that it is found if the run is killed before `latest` is; then becomes `latest`
_FAILURES = (OSError, CheckpointingException, torch.distributed.checkpoint.CheckpointException)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint below `root`, or None where there is none.

    Raises:
        UserError: `latest` names a directory that is not there, or is itself not there beside checkpoints.
    """
    directory = _pointed(root, "latest")
    if directory is None and (found := _found(root)):
        directory = _named(root, _FIRST)
        if directory not in found:
            raise UserError(
                f"{root} holds {', '.join(path.name for path in found)}, but no file `latest` that names the one to continue from; "
                f"write one of these names into {root / 'latest'}, or set another trainer.output_dir"
            )
    return directory


def best(root: Path) -> Path | None:
    """The checkpoint with the highest held-out accuracy below `root`, or None where none is kept."""
    return _pointed(root, "best")


def directory_of(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, once it is complete."""
    return root / f"step_{step:08d}"


def _pointed(root: Path, name: str) -> Path | None:
    directory = _named(root, name)
    if directory is not None and not (directory / _STATE_FILE).is_file():
        raise UserError(f"{root / name} names {directory}, which is not a complete checkpoint; restore it, or write the name of another step_* directory there")
    return directory


def _named(root: Path, name: str) -> Path | None:
    """What a pointer names, whether that is there or not."""
    pointer = root / name
    return root / pointer.read_text(errors="replace").strip() if pointer.is_file() else None


def read_state(directory: Path) -> dict[str, Any]:
    """The driver's state in a checkpoint.

    Raises:
        UserError: it is damaged, or of a format that this version does not read.
    """
    path, remedy = directory / _STATE_FILE, "restore it, or continue from another checkpoint"
    state = read_object(path, remedy)
    version = state.get("format_version")
    if isinstance(version, int) and version != FORMAT_VERSION:
        advice = "update, a newer version wrote it" if version > FORMAT_VERSION else "use the older version that wrote it"
        raise UserError(f"{directory} has format {version}, and this version reads format {FORMAT_VERSION}; {advice}")
    faults = [f"{name}={json.dumps(state.get(name))}" for name in ("format_version", "step") if type(state.get(name)) is not int]
    if not _describes_networks(state.get("networks"), with_optimizers="weights_only" not in state):
        faults.append("networks without the model and the kind of optimizer of each")
    if faults:
        raise UserError(f"{path} is damaged, it has {' and '.join(faults)}; {remedy}")
    return state


def _describes_networks(networks: Any, *, with_optimizers: bool) -> bool:
    """Whether this holds `identity` and, unless only weights were saved, the kind of optimizer of each network; a policy is always there."""
    return (
        isinstance(networks, dict)
        and "policy" in networks
        and all(
            isinstance(network, dict)
            and (not with_optimizers or "use_distributed_optimizer" in network)
            and isinstance(model := network.get("model"), dict)
            and isinstance(model.get("config"), dict)
            and "path" in model
            for network in networks.values()
        )
    )


def identity(hf: HuggingFaceModel) -> dict[str, Any]:
    """What the driver's state keeps of a network's model, for `check_model`."""
    return {"path": str(hf.path), "config": hf.identity}


def check_model(directory: Path, model: dict[str, Any], hf: HuggingFaceModel) -> None:
    """Raises UserError if a network of a checkpoint, whose `identity` was `model`, is of another config.json than `hf`, naming what differs."""
    saved, own = model["config"], hf.identity
    changed = [f"{key} was {saved.get(key)!r} and is now {own.get(key)!r}" for key in sorted(saved.keys() | own.keys()) if saved.get(key) != own.get(key)]
    if changed:
        raise UserError(
            f"{directory} is a checkpoint of another model, {model['path']}, than {hf.path}: {'; '.join(changed)}. "
            "Name that model again (model.path, critic.path), or set another trainer.output_dir"
        )


def begin(root: Path, step: int, num_parameters: dict[str, int], *, weights_only: bool = False) -> None:
    """Makes room for the checkpoint of `step` and removes what an interrupted one left. On the driver; not collective.

    Args:
        num_parameters: of each whole network, by name.
        weights_only: it will hold no optimizer.

    Raises:
        UserError: it cannot fit (naming what is needed and what is free; nothing was made), or `root` cannot be written.
    """
    needed = sum(num_parameters.values()) * (_BYTES_PER_WEIGHT if weights_only else _BYTES_PER_PARAMETER)
    try:
        for left in root.glob(".step_*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(next(path for path in (root, *root.absolute().parents) if path.exists())).free
        if free < needed:
            raise UserError(
                f"a checkpoint needs about {needed / 2**30:.2f} GiB, but {root} has {free / 2**30:.2f} GiB free; "
                "free space there or set trainer.output_dir elsewhere"
            )
        for name in num_parameters:
            (_partial(root, step) / name).mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write checkpoints to {root}: {error}; set trainer.output_dir elsewhere") from error


class Writing:
    """The tensors of one checkpoint on their way to the disk; `write` makes it.

    In the background a thread of this process writes a copy in host memory: it ends with the process, however that ends, and the
    thread takes part in no collective. Megatron's own asynchronous writer is a forked process, which survives its parent.
    """

    def __init__(self, root: Path, step: int, requests: list[Any], *, in_background: bool) -> None:
        self.step = step
        self._root, self._requests = root, requests
        self._files: dict[str, Checksum] | BaseException = {}
        self._thread: threading.Thread | None = None
        buckets = [[] if request.async_fn is None else _on_host(request.async_fn_args[1], copy=in_background) for request in requests]
        if in_background:
            self._thread = threading.Thread(target=self._write_files, args=(buckets,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write_files(buckets)

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are on the disk, or have failed to get there. Not collective."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Waits for all ranks' files and writes Megatron's description of them. Collective over the world.

        Raises:
            UserError: the disk does not take them. The partial checkpoint is removed and the previous one is still the latest.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            for request in self._requests:
                for finalize in request.finalize_fns:
                    finalize()
        except _FAILURES as error:
            shutil.rmtree(_partial(self._root, self.step), ignore_errors=True)
            raise _write_error(self._root, self.step, error) from error

    def checksums(self) -> dict[str, Checksum]:
        """Of this rank's files, by their paths below the checkpoint. Not collective.

        Raises:
            UserError: they could not be read back.
        """
        if isinstance(self._files, BaseException):
            raise _write_error(self._root, self.step, self._files) from self._files
        return self._files

    def _write_files(self, buckets_of_requests: list[list[Any]]) -> None:
        try:
            for request, buckets in zip(self._requests, buckets_of_requests, strict=True):
                if buckets:  # otherwise none of this network is this rank's to write
                    rank, _, results = request.async_fn_args
                    request.async_fn(rank, buckets, results, **request.async_fn_kwargs)
            paths = [Path(path) for buckets in buckets_of_requests for path, _, _ in buckets]
            self._files = checksums(_partial(self._root, self.step), paths)
        except BaseException as error:  # noqa: B036 - kept for the main thread
            self._files = error


def write(root: Path, step: int, networks: dict[str, tuple[Model, Optimizer | None]], *, in_background: bool = False) -> Writing:
    """Writes the tensors beside the earlier checkpoints. Collective over the world.

    Args:
        networks: those that `begin` was told of, each with its optimizer, or None to write its weights only.
        in_background: copy the tensors to host memory and return; the caller may train on, and calls `finish` when all ranks
            have written, or must have.

    Raises:
        UserError: the disk does not take them. The partial checkpoint is removed and the previous one is still the latest.
    """
    partial = _partial(root, step)
    requests = []
    try:
        for name, (model, optimizer) in networks.items():
            metadata = _metadata(model)
            state = _writable(_sharded_state(model, optimizer, metadata, is_loading=False))
            saved = _saved_metadata(metadata)
            requests.append(dist_checkpointing.save(state, str(partial / name), content_metadata=saved, async_sharded_save=True, async_strategy="mcore"))
    except _FAILURES as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(root, step, error) from error
    return Writing(root, step, requests, in_background=in_background)


def complete(root: Path, step: int, state: dict[str, Any], files: dict[str, Checksum], *, keep_last: int, is_best: bool = False) -> Path:
    """Makes what `write` wrote the latest checkpoint. On the driver, after all ranks have finished; not collective.

    Args:
        state: the driver's own state, JSON values.
        files: checksums of all ranks' files, by their paths below the checkpoint.
        keep_last: how many complete checkpoints remain, besides the best. Those after the one that is the latest so far, from before
            a return to it, go in any case: this one does not descend from them. Where none is the latest so far, all remain.
        is_best: `best` names this checkpoint from now on.

    Raises:
        UserError: the disk does not take it. An old checkpoint that cannot be deleted is a warning.
    """
    directory, partial = directory_of(root, step), _partial(root, step)
    try:
        write_durably(partial / _STATE_FILE, json.dumps(state | {"format_version": FORMAT_VERSION}, indent=2) + "\n")
        written = list(partial.rglob("*"))
        of_driver = checksums(partial, (path for path in written if path.is_file() and str(path.relative_to(partial)) not in files))
        # Each rank has synced its own files; not what Megatron writes on the driver in the end, nor the names of all of them.
        for path in written:
            if path.is_dir() or str(path.relative_to(partial)) in of_driver:
                sync(path)
        write_durably(partial / CHECKSUMS_FILE, json.dumps(files | of_driver, indent=2) + "\n")
        previous = _named(root, "latest")
        if (kept := _named(root, "best")) is not None and _is_abandoned(kept, directory, previous):
            (root / "best").unlink()
        if previous is None:
            write_durably(root / _FIRST, directory.name + "\n")
        else:
            _remove(directory)
        partial.rename(directory)
        if is_best:
            write_durably(root / "best", directory.name + "\n")
        # Before `latest` moves: it alone tells which ones this run has left behind.
        _discard(path for path in _found(root) if path != directory and _is_abandoned(path, directory, previous))
        write_durably(root / "latest", directory.name + "\n")
        found = [path for path in _found(root) if path <= directory]
        remaining = set(found) if previous is None else {*found[-keep_last:], _named(root, "best")}
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(root, step, error) from error
    _discard(path for path in found if path not in remaining)
    return directory


def _found(root: Path) -> list[Path]:
    """Every checkpoint below `root`, by step."""
    return sorted(path for path in root.glob("step_*") if _STEP_NAME.fullmatch(path.name))


def _is_abandoned(path: Path, new: Path, previous: Path | None) -> bool:
    """Whether a checkpoint is in the way of `new` or, later than `previous`, which `new` continues, none of its ancestors.

    Without `previous` nobody knows which ones are the run's own, and none is.
    """
    return previous is not None and (path.name >= new.name or (bool(_STEP_NAME.fullmatch(previous.name)) and path.name > previous.name))


def _discard(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        try:
            _remove(path)
        except OSError as error:
            warnings.warn(f"cannot delete the old checkpoint {path}: {error}; delete it by hand", stacklevel=2)


def _remove(directory: Path) -> None:
    """Deletes a checkpoint under a hidden name: one that is half deleted when the process dies must not look like a whole one."""
    if directory.exists():
        hidden = directory.with_name(f".{directory.name}.removed.partial")
        directory.rename(hidden)
        shutil.rmtree(hidden)


def _on_host(buckets: list[Any], *, copy: bool) -> list[Any]:
    """Megatron's write buckets with their tensors in host memory: copies, made now, which training cannot change any more, or as the writer takes
    them, so that no more than one is there.
    """
    hold: Callable[[Iterator[Any]], Iterable[Any]] = list if copy else iter
    return [(path, key, (data, hold((item, tensor.to("cpu", copy=copy)) for item, tensor in tensors))) for path, key, (data, tensors) in buckets]


def _writable(state: dict[str, Any]) -> dict[str, Any]:
    """A network's state with tensors that Megatron's writer takes as they are.

    It copies those that are views, as all are that lie in Megatron's buffers: torch.save would write the whole storage.
    """
    apply_factories(state)  # they make views
    dict_list_map_inplace(_in_own_storage, state)
    return state


def _in_own_storage(value: Any) -> Any:
    """A sharded tensor in host memory gets a storage of its size at the same place; anything else stays as it is."""
    if isinstance(value, ShardedTensor) and value.data.device.type == "cpu" and value.data.is_contiguous():
        octets = value.data.detach().reshape(-1).view(torch.uint8)
        value.data = torch.from_numpy(octets.numpy()).view(value.dtype).view(value.local_shape)
    return value


def _partial(root: Path, step: int) -> Path:
    return root / f".step_{step:08d}.partial"


def _write_error(root: Path, step: int, error: BaseException) -> UserError:
    kept = _named(root, "latest")
    left = f"{kept} is still the latest" if kept else "no checkpoint was left"
    return UserError(f"cannot write the checkpoint of step {step} to {root}: {_cause(error)}; {left}")


def load(directory: Path, model: Model, optimizer: Optimizer | None) -> None:
    """Fills model (and optimizer and schedule, if given) from a network of a checkpoint of any parallel layout. Collective over the world.

    Args:
        directory: the network's, e.g. `step_00000040/policy`.

    Raises:
        UserError: it cannot be read, or does not fit the model, the layout or the optimizer. What is damaged, `checksums.check` tells before.
    """
    metadata = _metadata(model)
    try:
        state = _sharded_state(model, optimizer, metadata, is_loading=True)
        dict_list_map_inplace(_merged_in_place, state)
        state = dist_checkpointing.load(state, str(directory))
    except (OSError, EOFError, CheckpointingException, torch.distributed.checkpoint.CheckpointException, RuntimeError, KeyError) as error:
        raise UserError(
            f"cannot load the checkpoint {directory}: {type(error).__name__}: {_cause(error)}; if it can be read, it does not fit the model {model.hf.path}, "
            "the layout (parallel) or the optimizer settings of this run; continue with those that wrote it"
        ) from error
    for number, chunk in enumerate(model.chunks):
        chunk.load_state_dict(state[f"model{number}"], strict=True)
    if optimizer is not None:
        _complete_state(state["optimizer"], optimizer)
        optimizer.megatron.load_state_dict(state["optimizer"])
        optimizer.schedule.load_state_dict(state["schedule"])


def _merged_in_place(value: Any) -> Any:
    """Parts that a factory makes of a tensor are views, into which the checkpoint is read: the tensor is then whole, and needs no new one of its parts."""
    return dataclasses.replace(value, merge_fn=functools.partial(_same, value.data)) if isinstance(value, ShardedTensorFactory) else value


def _same(tensor: Tensor, parts: Any) -> Tensor:
    return tensor


def _complete_state(saved: Any, optimizer: Optimizer) -> None:
    """Gives the saved optimizer what Megatron cannot load it without.

    The parameter groups get the learning rates of this run, which may differ: Megatron finds a group by them, among others. And without
    the distributed optimizer Megatron saves no step of 0, which torch's Adam must have.
    """
    if isinstance(saved, dict):
        if "max_lr" in saved and "min_lr" in saved:
            saved.update(max_lr=optimizer.schedule.max_lr, min_lr=optimizer.schedule.min_lr)
        if "state" in saved and optimizer.has_step_of_parameter:
            saved["state"].setdefault("common_step", torch.tensor(0.0))
        saved = list(saved.values())
    if isinstance(saved, list):
        for part in saved:
            _complete_state(part, optimizer)


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


def _cause(error: BaseException) -> str:
    """The innermost reason of a chain, in one line: Megatron wraps an OSError of a writer several times."""
    found: list[BaseException] = [error]
    while (inner := found[-1].__cause__ or found[-1].__context__) is not None and inner not in found:
        found.append(inner)
    system = [part for part in found if isinstance(part, OSError)]
    return str(system[-1] if system else found[-1]).strip().splitlines()[-1]
