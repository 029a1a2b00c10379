"""`convert export` over a changed checkpoint, and what `convert verify` compares and refuses."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from otb_megatron.config import validate as validate_config
from otb_megatron.trainer import learner
from otb_megatron.trainer.conversion import export, import_model
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import run_ranks
from tests.distributed.training import settings
from tests.models import make_model


class Killed(BaseException):
    """Stands for the end of the process: nothing that handles errors sees it."""


class KilledExport(Export):
    """An export in several files that ends after 12 tensors more."""

    def write(self, tensors: Any, *options: Any) -> None:
        def some() -> Any:
            yield from (item for item, _ in zip(tensors, range(12), strict=False))
            raise Killed

        super().write(some(), *options)


def _kill_an_export(values: dict[str, Any], directory: Path) -> list[str]:
    """Returns the files that it called finished."""
    learner.Export = functools.partial(KilledExport, max_file_bytes=100_000)
    with pytest.raises(Killed):
        export(validate_config(values, "test"), None, directory)
    return list(json.loads((directory.with_name("export.partial") / "progress.json").read_text())["checksums"])


def _export_over_a_changed_checkpoint(rank: int, world_size: int, values: dict[str, Any], work: Path) -> list[list[str]]:
    """Files finished after one and two killed exports of a checkpoint, and after one of another model's that took its place."""
    config = validate_config(values, "test")
    import_model(config)
    finished = [_kill_an_export(values, work / "export"), _kill_an_export(values, work / "export")]
    shutil.rmtree(work / "run")
    make_model(work / "model", "qwen3", seed=1)
    import_model(config)
    finished.append(_kill_an_export(values, work / "export"))
    learner.Export = functools.partial(Export, max_file_bytes=100_000)
    export(config, None, work / "export")
    return finished


def test_an_export_of_replaced_weights_begins_anew(tmp_path: Path) -> None:
    """At the same path, with the same step and configuration."""
    make_model(tmp_path / "model", "qwen3")
    (finished,) = run_ranks(_export_over_a_changed_checkpoint, 1, settings(tmp_path / "model", tmp_path), tmp_path, timeout_s=120)
    assert 0 < len(finished[0]) < len(finished[1]) and finished[2] == finished[0]
    model, exported = Checkpoint(tmp_path / "model"), Checkpoint(tmp_path / "export")
    assert exported.check() > len(finished[1]) and exported.names == model.names
    assert all(torch.equal(exported.get(name), model.get(name)) for name in model.names)
