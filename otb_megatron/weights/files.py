"""Hugging Face checkpoints on disk: tensors by name from any number of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from otb_megatron.types import UserError

INDEX = "model.safetensors.index.json"
CHECKSUMS = "XXH128SUMS"  # the format of the command xxh128sum; a SHA-256 takes longer than writing the file
_ONLY_SAFETENSORS = "only safetensors are read (loading a pickle can run code, so none is opened); save the model with save_pretrained of transformers 5"
_DOWNLOAD_AGAIN = "download the checkpoint again"
_JSON_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Checkpoint:
    """The tensors of a Hugging Face directory by name; a tensor is read from disk when asked for, and the headers of all files before the first one.

    Every method raises UserError where the directory holds no weights, or a file or the index is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[Path, safe_open] = {}

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str, dim: int | None = None, span: slice | int | None = None) -> Tensor:
        """Tensor `name` in its stored dtype, or of it only `span` along `dim` (a number: without that dimension); no more is read.

        Raises:
            UserError: its file is unreadable, or what was read cannot be weights.
        """
        file = self._files[name]
        with self._reading(file) as tensors:
            tensor = tensors.get_tensor(name) if dim is None or span is None else tensors.get_slice(name)[(*[slice(None)] * dim, span)]
        if tensor.dtype not in _FLOATS:
            raise UserError(f"{name} in {file} is {str(tensor.dtype).removeprefix('torch.')}; only float32, bfloat16, float16 and float64 weights are read")
        if count := num_not_finite(tensor):
            raise UserError(f"{name} in {file} holds {count} values that are NaN or infinite; download or export the model again")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, without reading it."""
        with self._reading(self._files[name]) as tensors:
            return tuple(tensors.get_slice(name).get_shape())

    def check(self) -> int:
        """Compares every file with its XXH3 checksum in the directory's XXH128SUMS, where the export wrote one.

        Returns:
            How many files were compared: 0 for a directory without checksums.

        Raises:
            UserError: names every file that is missing or altered.
        """
        if not (self.directory / CHECKSUMS).is_file():
            return 0
        faults = []
        # A byte that is no text makes a name that no file has.
        lines = (self.directory / CHECKSUMS).read_text(errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            digest, _, file = line.partition("  ")
            if not file:
                faults.append(f"line {number} of {CHECKSUMS} is not a checksum and the name of a file")
            elif not (self.directory / file).is_file():
                faults.append(f"{file} is missing")
            elif checksum(self.directory / file) != digest:
                faults.append(f"{file} is not what was written")
        if faults:
            raise UserError(f"{self.directory} does not fit its {CHECKSUMS}: {'; '.join(faults)}; copy or export it again")
        return len(lines)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Where each tensor lies by the files' headers, which hold also what the index does not name."""
        weight_map = self._index()
        files = [self.directory / file for file in sorted(set(weight_map.values()))] or [self._single_file()]
        places: dict[str, list[Path]] = {name: [] for name in weight_map}
        for file in files:
            with self._reading(file) as tensors:
                for name in tensors.keys():
                    places.setdefault(name, []).append(file)
        faults = [f"{name} is in none of the files" for name, found in places.items() if not found]
        faults += [f"{name} is in {' and '.join(file.name for file in found)}" for name, found in places.items() if len(found) > 1]
        if faults:
            raise UserError(f"{self.directory / INDEX} does not fit its files: {'; '.join(faults)}; {_DOWNLOAD_AGAIN}")
        return {name: file for name, (file,) in places.items()}

    @contextmanager
    def _reading(self, file: Path) -> Iterator[safe_open]:
        """The tensors of a file, and UserError for what goes wrong with them."""
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            yield self._open[file]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {file}: {error}; the file is truncated or not a safetensors file") from error

    def _index(self) -> dict[str, str]:
        """The file of each tensor by the index; nothing where there is none."""
        path = self.directory / INDEX
        if not path.is_file():
            return {}
        weight_map = read_object(path, _DOWNLOAD_AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{path} has no weight_map of tensors to files; {_DOWNLOAD_AGAIN}")
        foreign = sorted({file for file in weight_map.values() if not file.endswith(".safetensors")})
        if foreign:
            raise UserError(f"{path} names {', '.join(foreign)}; {_ONLY_SAFETENSORS}")
        absent = sorted({file for file in weight_map.values() if not (self.directory / file).is_file()})
        if absent:
            raise UserError(f"{path} names files that are not there: {', '.join(absent)}; {_DOWNLOAD_AGAIN}")
        return weight_map

    def _single_file(self) -> Path:
        file = self.directory / "model.safetensors"
        if not file.is_file():
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for path in self.directory.glob(pattern))
            found = f", but {', '.join(pickles)}" if pickles else ""
            raise UserError(f"{self.directory}: neither model.safetensors nor {INDEX} there{found}; {_ONLY_SAFETENSORS}")
        return file


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        remedy: what the user can do if there is none, the end of the message.

    Raises:
        UserError: the file cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {file}: {type(error).__name__}: {error}; {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{file} holds a JSON {_JSON_KINDS[type(value)]} instead of an object; {remedy}")
    return value


def num_not_finite(tensor: Tensor) -> int:
    """How many values of a tensor are NaN or infinite."""
    # A sum that is finite has finite terms only, and takes a tenth of the time of looking at each.
    return 0 if bool(tensor.sum(dtype=torch.float32).isfinite()) else int((~tensor.isfinite()).sum())


def checksum(file: Path) -> str:
    """XXH3 of a file's bytes, 128 bits in hexadecimal."""
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as opened:
        while piece := opened.read(1 << 24):
            digest.update(piece)
    return digest.hexdigest()
