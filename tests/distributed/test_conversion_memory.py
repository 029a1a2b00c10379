"""Host memory of an import and of an export, and the progress that they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launcher import run_ranks
from tools.benchmarks.conversion import convert_rank, largest_tensor_bytes, write_model

SHAPE = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64, vocab_size=8192)
ALLOWANCE_BYTES = 56 * 2**20  # two pieces of 16 MiB that a checksum reads, and what allocators, process groups and Python's objects take


def _convert(rank: int, world_size: int, work: Path) -> tuple[dict[str, Any], str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = convert_rank(rank, world_size, work, 1)
    return found, printed.getvalue()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_conversion_holds_its_shard_and_two_tensors(tmp_path: Path, tp: int) -> None:
    """Of 150 MiB. An import that also held Adam's moments would need three times the shard."""
    write_model(tmp_path / "model", SHAPE)
    bucket_bytes = largest_tensor_bytes(SHAPE)
    for rank, (found, printed) in enumerate(run_ranks(_convert, tp, tmp_path, timeout_s=250, process_group=False)):
        shard_bytes = found["shard_bytes"]
        limit_bytes = shard_bytes + 2 * bucket_bytes + ALLOWANCE_BYTES
        assert limit_bytes < 3 * shard_bytes
        assert shard_bytes < found["import_bytes"] < limit_bytes
        assert shard_bytes < found["export_bytes"] < limit_bytes
        countdowns = re.findall(r"^(\d+)/(\d+) MiB  elapsed", printed, re.MULTILINE)
        # The import counts what the first rank reads of its shard, the export the whole model.
        assert (str(shard_bytes >> 20),) * 2 in countdowns if rank == 0 else not countdowns
