"""Checksums of a checkpoint's files, so that a damaged one is found and named before it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from otb_megatron.types import UserError
from otb_megatron.weights.files import checksum, read_object

CHECKSUMS_FILE = "checksums.json"


class Checksum(TypedDict):
    """Of one file. Both values are compared, so that a truncated file is called truncated."""

    num_bytes: int
    xxh3_128: str  # hex; not cryptographic: it finds damage, not malice, at the speed of memory


def checksums(directory: Path, paths: Iterable[Path]) -> dict[str, Checksum]:
    """Reads every file once. Returns the checksums by the path below `directory`."""
    return {str(path.relative_to(directory)): _checksum(path) for path in paths}


def check(directory: Path, part: int, num_parts: int) -> None:
    """Compares every `num_parts`-th file below `directory`, from number `part` on, with `directory`/checksums.json.

    Raises:
        UserError: naming every file that is missing, truncated or altered.
    """
    listing = directory / CHECKSUMS_FILE
    expected = read_object(listing, _remedy(directory))
    try:
        mine = sorted(expected.items())[part::num_parts]
        faults = [fault for name, checksum in mine if (fault := _fault(directory, name, checksum))]
    except (OSError, KeyError, TypeError) as error:
        raise UserError(f"cannot read {listing}: {type(error).__name__}: {error}; {_remedy(directory)}") from error
    if faults:
        raise UserError(f"the checkpoint {directory} is damaged: {'; '.join(faults)}; {_remedy(directory)}")


def _fault(directory: Path, name: str, expected: Checksum) -> str | None:
    path = directory / name
    if not path.is_file():
        return f"{name} is missing"
    if (num_bytes := path.stat().st_size) != expected["num_bytes"]:
        return f"{name} has {num_bytes} bytes instead of {expected['num_bytes']}"
    return None if _checksum(path)["xxh3_128"] == expected["xxh3_128"] else f"the contents of {name} have changed"


def _remedy(directory: Path) -> str:
    return f"restore it, or write the name of another step_* directory into {directory.parent / 'latest'}"


def _checksum(path: Path) -> Checksum:
    return Checksum(num_bytes=path.stat().st_size, xxh3_128=checksum(path))
