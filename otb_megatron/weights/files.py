"""Hugging Face checkpoints on disk: read tensors by name from any number of safetensors files, write them back in shards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from otb_megatron.types import UserError

INDEX = "model.safetensors.index.json"
_CARRIED = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja chat_template.json "
    "vocab.json merges.txt added_tokens.json tokenizer.model"
).split()
_ONLY_SAFETENSORS = "only safetensors are read (loading a pickle can run code, so none is opened); save the model with save_pretrained of transformers 5"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint:
    """The tensors of a Hugging Face directory by name; a tensor is read from disk when asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = {name: directory / file for name, file in self._index().items()}
        self._open: dict[Path, safe_open] = {}

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> Tensor:
        """The full tensor `name` in its stored dtype. Raises UserError if its file is unreadable or its values cannot be weights."""
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {file}: {error}; the file is truncated or not a safetensors file") from error
        if tensor.dtype not in _FLOATS:
            raise UserError(f"{name} in {file} is {str(tensor.dtype).removeprefix('torch.')}; only float32, bfloat16, float16 and float64 weights are read")
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{name} in {file} holds {int((~tensor.isfinite()).sum())} values that are NaN or infinite; download or export the model again")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, without reading it."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def _index(self) -> dict[str, str]:
        if (self.directory / INDEX).is_file():
            weight_map = json.loads((self.directory / INDEX).read_text())["weight_map"]
            foreign = sorted({file for file in weight_map.values() if not file.endswith(".safetensors")})
            if foreign:
                raise UserError(f"{self.directory / INDEX} names {', '.join(foreign)}; {_ONLY_SAFETENSORS}")
            absent = sorted({file for file in weight_map.values() if not (self.directory / file).is_file()})
            if absent:
                raise UserError(f"{self.directory / INDEX} names files that are not there: {', '.join(absent)}; download the checkpoint again")
            return weight_map
        file = self.directory / "model.safetensors"
        if not file.is_file():
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in self.directory.glob(pattern))
            found = f", but {', '.join(pickles)}" if pickles else ""
            raise UserError(f"{self.directory}: neither model.safetensors nor {INDEX} there{found}; {_ONLY_SAFETENSORS}")
        try:
            with safe_open(file, framework="pt") as tensors:
                return {name: file.name for name in tensors.keys()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {file}: {error}; the file is truncated or not a safetensors file") from error


def write_checkpoint(directory: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, dtype: torch.dtype, max_shard_bytes: int = 4 * 2**30) -> None:
    """Writes a complete Hugging Face directory: sharded safetensors with an index, config, generation config, tokenizer and chat template.

    It is written beside `directory` and renamed at the end, so that a reader never sees half of one.

    Args:
        directory: new, empty, or an earlier export, which is then replaced.
        tensors: name and full tensor, streamed; at most `max_shard_bytes` of them are held.
        source: the directory the model started from; everything but the weights is copied from there.
        dtype: recorded in config.json.

    Raises:
        UserError: `directory` holds something else, or the disk does not take it. What was there before is then still there.
    """
    if directory.resolve() == source.resolve():
        raise UserError(f"the export must not replace the model it comes from, {source}; name another directory")
    if directory.exists() and any(directory.iterdir()) and not ((directory / "config.json").is_file() and list(directory.glob("*.safetensors"))):
        raise UserError(f"{directory} holds files that are not an earlier export; name another directory, or empty it")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_shards(partial, tensors, max_shard_bytes)
        for name in _CARRIED:
            if (source / name).is_file():
                shutil.copy(source / name, partial / name)
        config = json.loads((source / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        if config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0  # layers that draft further tokens are not trained and not written
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the Hugging Face export {directory}: {error}; what was there before is as it was") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(tensors, max_shard_bytes):
        save_file(shard, directory / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) == 1:
        (directory / "part-0.safetensors").rename(directory / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"part-{number}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n")


def _shards(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    yield shard
