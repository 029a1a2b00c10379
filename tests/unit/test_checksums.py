"""A changed bit, a lost byte and a lost file are each found and named, and each file is looked at by exactly one part."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from otb_megatron.mcore.checksums import CHECKSUMS_FILE, check, checksums
from otb_megatron.types import UserError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in range(5):
        (tmp_path / f"file{number}").write_bytes(bytes(range(256)) * 100 * (number + 1))
    (tmp_path / CHECKSUMS_FILE).write_text(json.dumps(checksums(tmp_path, tmp_path.glob("file*"))))
    return tmp_path


def test_the_empty_input_has_the_published_checksum(tmp_path: Path) -> None:
    """XXH3-128 of no bytes with seed 0, from the reference implementation's test vectors."""
    (tmp_path / "empty").touch()
    assert checksums(tmp_path, [tmp_path / "empty"]) == {"empty": {"num_bytes": 0, "xxh3_128": "99aa06d3014798d86001c324468d497f"}}


def _flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (_flip, "the contents of file3 have changed"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), "file3 has 102399 bytes instead of 102400"),
    (Path.unlink, "file3 is missing"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGE)
def test_damage_is_named_by_the_one_part_that_looks_at_it(directory: Path, damage: Callable[[Path], object], told: str) -> None:
    for part in range(2):
        check(directory, part, 2)
    damage(directory / "file3")
    check(directory, 0, 2)  # files 0, 2 and 4
    with pytest.raises(UserError, match=told):
        check(directory, 1, 2)


def test_a_damaged_list_is_named(directory: Path) -> None:
    (directory / CHECKSUMS_FILE).write_text("{")
    with pytest.raises(UserError, match=CHECKSUMS_FILE):
        check(directory, 0, 1)
