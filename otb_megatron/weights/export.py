"""Writes a Hugging Face model directory from a stream of tensors, holding one of them at a time.

safetensors' own writer wants all tensors of a file at once. Names, dtypes and shapes are known before the first value here, and
with them every byte of a file's header and every offset, so that each tensor can go to disk as it comes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from otb_megatron.types import UserError
from otb_megatron.weights.durable import sync, write_durably
from otb_megatron.weights.files import CHECKSUMS, INDEX, checksum

TensorDescription = tuple[str, torch.dtype, tuple[int, ...]]  # name, dtype, shape

MAX_FILE_BYTES = 4 * 2**30
_PROGRESS = "progress.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64"}
_CARRIED = (
    "generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja chat_template.json "
    "vocab.json vocab.txt merges.txt added_tokens.json tokenizer.model tekken.json"
).split()
_TEMPLATES = "additional_chat_templates"  # a directory of chat templates by name
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_WRITTEN = {"config.json", INDEX, CHECKSUMS, *_CARRIED, f"{_TEMPLATES}/"}  # beside the weights
_NUM_NAMED = 5  # of the files that are in the way


class Export:
    """A directory that is being written: sharded safetensors with an index, config, generation config, tokenizer, chat template, checksums.

    It is written beside `directory` and renamed at the end, so that a reader never sees half of one. What a killed export had finished
    and is still whole is taken over by the next one with the same `identity`.

    Args:
        directory: new, empty, or an earlier export and nothing else, which is then replaced. If it is a link, what it points to.
        described: every tensor in the order in which they will come.
        source: the directory the model started from; everything but the weights is copied from there.
        dtype: recorded in config.json.
        identity: what the weights are (JSON values), equal only if they are. None: never continue an earlier export.
        max_file_bytes: tensors share a file up to this size.

    Raises:
        UserError: `directory`, or its neighbours .partial and .replaced, are no directory or hold what no export wrote, or `source`;
            or they cannot be written to.
    """

    def __init__(
        self,
        directory: Path,
        described: Sequence[TensorDescription],
        *,
        source: Path,
        dtype: torch.dtype,
        identity: Any = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._directory, self._source, self._dtype = directory.resolve(), source, dtype
        groups = list(_files(described, max_file_bytes))
        single = len(groups) == 1
        self._files = {"model.safetensors" if single else f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}
        self.total_bytes = sum(_num_bytes(one) for one in described)
        plan = {file: [[name, str(dtype), list(shape)] for name, dtype, shape in group] for file, group in self._files.items()}
        self._identity = None if identity is None else {"weights": identity, "plan": xxhash.xxh3_128_hexdigest(json.dumps(plan).encode())}
        try:
            _check_replaceable(self._directory, source)
            self._partial, self._replaced = (self._directory.with_name(self._directory.name + ending) for ending in (".partial", ".replaced"))
            _check_replaceable(self._partial, source)
            _check_replaceable(self._replaced, source)
            self._digests = self._earlier()
            if not self._digests:
                shutil.rmtree(self._partial, ignore_errors=True)
                self._partial.mkdir(parents=True)
                self._note_progress()  # before anything else is in it: an export without it or checksums is not known as one
        except OSError as error:
            raise self._error(error) from error

    @property
    def num_done(self) -> int:
        """Tensors at the beginning of `described` that an interrupted export has written."""
        return sum(len(self._files[file]) for file in self._digests)

    def write(self, tensors: Iterable[tuple[str, Tensor]], progress: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Takes the tensors from number `num_done` on and completes the directory.

        Args:
            progress: called with the bytes done, of `total_bytes`, after each tensor.

        Raises:
            UserError: the disk does not take it. Then, and after an error of `tensors`, what was there before is still there and nothing else.
        """
        try:
            stream = iter(tensors)
            done = sum(_num_bytes(one) for file in self._digests for one in self._files[file])
            for file, group in list(self._files.items())[len(self._digests) :]:
                self._digests[file] = _write_file(self._partial / file, group, stream, lambda size, before=done: progress(before + size))
                done += sum(map(_num_bytes, group))
                self._note_progress()
            self._complete()
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise self._error(error) from error
        except Exception:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise

    def _earlier(self) -> dict[str, str]:
        """File -> checksum of what an interrupted export of the same weights finished."""
        progress = _progress(self._partial)
        if self._identity is None or progress is None or progress["identity"] != self._identity:
            return {}
        return {file: progress["checksums"][file] for file in itertools.takewhile(lambda file: self._is_whole(file, progress["checksums"]), self._files)}

    def _is_whole(self, file: str, digests: dict[str, str]) -> bool:
        path = self._partial / file
        return file in digests and path.is_file() and checksum(path) == digests[file]

    def _note_progress(self) -> None:
        write_durably(self._partial / _PROGRESS, json.dumps({"identity": self._identity, "checksums": self._digests}))

    def _complete(self) -> None:
        if len(self._files) > 1:
            weight_map = {name: file for file, group in self._files.items() for name, _, _ in group}
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            (self._partial / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for path in (*(self._source / name for name in _CARRIED), *(self._source / _TEMPLATES).glob("*.jinja")):
            if path.is_file():
                copy = self._partial / path.relative_to(self._source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)  # not the mode: one that cannot be written could not be copied again
        config = json.loads((self._source / "config.json").read_text()) | {"dtype": str(self._dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)  # its name before transformers 5
        if config.get("num_nextn_predict_layers"):
            config["num_nextn_predict_layers"] = 0  # layers that draft further tokens are not trained and not written
        (self._partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (self._partial / CHECKSUMS).write_text("".join(f"{digest}  {file}\n" for file, digest in self._digests.items()))
        for path in (*self._partial.rglob("*"), self._partial):
            sync(path)
        (self._partial / _PROGRESS).unlink()  # only now: what is left by a power failure is always known by the one or the other list
        sync(self._partial)
        self._take_place()

    def _take_place(self) -> None:
        """Puts the new directory where the earlier one was; where that fails, the earlier one is there again."""
        if self._directory.exists():  # otherwise `_replaced` may be what a killed export had moved away
            shutil.rmtree(self._replaced, ignore_errors=True)
            self._directory.rename(self._replaced)
        try:
            self._partial.rename(self._directory)
        except OSError:
            if self._replaced.exists():
                self._replaced.rename(self._directory)
            raise
        sync(self._directory.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def _error(self, error: OSError) -> UserError:
        return UserError(f"cannot write the Hugging Face export {self._directory}: {error}; what was there before is as it was")


def _check_replaceable(place: Path, source: Path) -> None:
    """Raises UserError where removing `place` would remove what no export wrote, or a part of `source`."""
    if not os.path.lexists(place):
        return
    if place.is_symlink() or not place.is_dir():
        raise UserError(f"{place} is not a directory, so no export can take its place; name another one, or move it away")
    if any(path.resolve().is_relative_to(place) for path in (source, *source.iterdir())):  # its files may be links
        raise UserError(f"the export would replace {place}, and with it the model it comes from, {source}; name another directory")
    if foreign := _foreign(place):
        named = ", ".join(foreign[:_NUM_NAMED]) + (f" and {len(foreign) - _NUM_NAMED} more" if len(foreign) > _NUM_NAMED else "")
        raise UserError(f"{place} holds what is not an earlier export: {named}; name another directory, or move that away")


def _foreign(place: Path) -> list[str]:
    """Names of what no export wrote into `place`: all of it, unless one has left its checksums or, interrupted, its progress there."""
    names = {path.name + "/" * path.is_dir() for path in place.iterdir()}
    names |= {f"{_TEMPLATES}/{path.name}" for path in (place / _TEMPLATES).glob("*") if path.is_dir() or path.suffix != ".jinja"}
    if names <= {_PROGRESS + ".partial"}:
        return []
    if _progress(place) is None:
        weights = _listed(place)
        return sorted(names - weights - _WRITTEN if weights else names)
    return sorted(name for name in names - _WRITTEN - {_PROGRESS, _PROGRESS + ".partial"} if not _WEIGHTS.fullmatch(name))


def _listed(place: Path) -> set[str]:
    """The weights that an export has left in `place`; none where the list of checksums is not an export's."""
    try:
        listed = {line.partition("  ")[2] for line in (place / CHECKSUMS).read_text().splitlines()}
    except (OSError, ValueError):
        return set()
    return listed if all(map(_WEIGHTS.fullmatch, listed)) else set()


def _progress(place: Path) -> dict[str, Any] | None:
    """What an interrupted export has noted in `place`: its identity, and the checksums of the files it finished."""
    try:
        progress = json.loads((place / _PROGRESS).read_text())
    except (OSError, ValueError):
        return None
    return progress if isinstance(progress, dict) and progress.keys() == {"identity", "checksums"} else None


def _files(described: Sequence[TensorDescription], max_file_bytes: int) -> Iterator[list[TensorDescription]]:
    group: list[TensorDescription] = []
    size = 0
    for one in described:
        if group and size + _num_bytes(one) > max_file_bytes:
            yield group
            group, size = [], 0
        group.append(one)
        size += _num_bytes(one)
    yield group


def _write_file(path: Path, described: Sequence[TensorDescription], stream: Iterator[tuple[str, Tensor]], progress: Callable[[int], None]) -> str:
    """Writes one safetensors file from the next tensors of `stream` and returns its checksum."""
    digest = xxhash.xxh3_128()
    done = 0
    with path.open("wb", buffering=0) as file:
        header = _header(described)
        file.write(header)
        digest.update(header)
        for name, dtype, shape in described:
            found, tensor = next(stream)
            if (found, tensor.dtype, tuple(tensor.shape)) != (name, dtype, shape):
                raise RuntimeError(f"{found} {tensor.dtype} {tuple(tensor.shape)} came where {name} {dtype} {shape} was described")
            values = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            _write_all(file, values)
            digest.update(values)
            done += values.nbytes
            progress(done)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(file: Any, values: Any) -> None:
    """The operating system takes at most 2 GiB at once."""
    view = memoryview(values)
    while len(view) > 0:
        view = view[file.write(view) :]


def _header(described: Sequence[TensorDescription]) -> bytes:
    """The beginning of a safetensors file: the length of the JSON as eight bytes, little-endian, and the JSON, filled with spaces to a multiple of eight."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for one in described:
        name, dtype, shape = one
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, offset + _num_bytes(one)]}
        offset += _num_bytes(one)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _num_bytes(described: TensorDescription) -> int:
    _, dtype, shape = described
    return math.prod(shape) * dtype.itemsize
