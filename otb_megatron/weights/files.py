"""Hugging Face checkpoints on disk: tensors by name from any number of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from otb_megatron.types import UserError

INDEX = "model.safetensors.index.json"
CHECKSUMS = "XXH128SUMS"  # the format of the command xxh128sum; a SHA-256 takes longer than writing the file
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

    def get(self, name: str, dim: int | None = None, span: slice | int | None = None) -> Tensor:
        """Tensor `name` in its stored dtype, or of it only `span` along `dim` (a number: without that dimension); no more is read.

        Raises:
            UserError: its file is unreadable, or what was read cannot be weights.
        """
        file = self._files[name]
        try:
            if dim is None or span is None:
                tensor = self._opened(file).get_tensor(name)
            else:
                tensor = self._opened(file).get_slice(name)[(*[slice(None)] * dim, span)]
        except (OSError, SafetensorError) as error:
            raise UserError(f"cannot read {name} from {file}: {error}; the file is truncated or not a safetensors file") from error
        if tensor.dtype not in _FLOATS:
            raise UserError(f"{name} in {file} is {str(tensor.dtype).removeprefix('torch.')}; only float32, bfloat16, float16 and float64 weights are read")
        if count := num_not_finite(tensor):
            raise UserError(f"{name} in {file} holds {count} values that are NaN or infinite; download or export the model again")
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`, without reading it."""
        return tuple(self._opened(self._files[name]).get_slice(name).get_shape())

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
        lines = (self.directory / CHECKSUMS).read_text().splitlines()
        for line in lines:
            digest, _, file = line.partition("  ")
            if not (self.directory / file).is_file():
                faults.append(f"{file} is missing")
            elif checksum(self.directory / file) != digest:
                faults.append(f"{file} is not what was written")
        if faults:
            raise UserError(f"{self.directory} does not fit its {CHECKSUMS}: {'; '.join(faults)}; copy or export it again")
        return len(lines)

    def _opened(self, file: Path) -> safe_open:
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]

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
