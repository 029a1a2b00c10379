"""Rows of a data file as plain dicts, each with its place for error messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from otb_megatron.types import UserError

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "response")  # the others of a columnar file are not read


@dataclass(frozen=True, slots=True)
class Row:
    number: int  # from 0, in the order of the file
    place: str  # `train.jsonl:12` or `train.parquet row 11`
    values: Any  # what the row holds; a dict where it is well formed
    fault: str | None = None  # why the row could not be read


def read_rows(path: Path, num_rows: int | None) -> list[Row]:
    """Reads the first `num_rows` rows (None: all) of a JSONL or Parquet file or of a directory written by `datasets`' save_to_disk.

    Raises:
        UserError: the file is missing, of another kind or cannot be read at all. What is wrong with one row stands in the row.
    """
    if not path.exists():
        raise UserError(f"the data file {path} does not exist; set `path` under data.train or data.validation to one that does")
    if path.is_dir():
        rows = _read_datasets(path)
    elif path.suffix == ".jsonl":
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise UserError(f"the data file {path} is of no known kind; known are .jsonl and .parquet files and directories written by datasets' save_to_disk")
    return list(islice(rows, num_rows))


def _read_jsonl(path: Path) -> Iterator[Row]:
    number = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path.name}:{line_number}"
            try:
                yield Row(number, place, json.loads(line))
            except ValueError as error:  # bad JSON or bad UTF-8
                yield Row(number, place, None, f"not valid JSON ({error})")
            number += 1


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file: {error}") from error
    with file:
        columns = [name for name in COLUMNS if name in file.schema_arrow.names]
        batches = (batch.to_pylist() for batch in file.iter_batches(columns=columns))
        yield from _numbered(path, (values for batch in batches for values in batch))


def _read_datasets(path: Path) -> Iterator[Row]:
    import datasets  # takes seconds to import, and only this kind of source needs it

    try:
        dataset = datasets.load_from_disk(str(path))
    except FileNotFoundError as error:
        raise UserError(f"the directory {path} was not written by datasets' save_to_disk; point to a .jsonl or .parquet file or to such a directory") from error
    if isinstance(dataset, datasets.DatasetDict):
        raise UserError(f"{path} holds the splits {', '.join(dataset)}; point to one of them, for example {path / next(iter(dataset))}")
    return _numbered(path, dataset.select_columns([name for name in COLUMNS if name in dataset.column_names]))


def _numbered(path: Path, rows: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for number, values in enumerate(rows):
        yield Row(number, f"{path.name} row {number}", values)
