"""`convert export` over a changed checkpoint, and what `convert verify` compares and refuses."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from otb_megatron import cli
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


class Exported(NamedTuple):
    """A checkpoint's export, and its configuration's file."""

    config: Path
    directory: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Imported and exported; not to be changed."""
    work = tmp_path_factory.mktemp("work")
    make_model(work / "model", "qwen3")
    values = settings(work / "model", work)
    run_ranks(_import_and_export, 1, values, timeout_s=120)
    (work / "run.yaml").write_text(yaml.safe_dump(values))
    return Exported(work / "run.yaml", work / "run" / "export")


@pytest.fixture
def exported(whole: Exported, tmp_path: Path) -> Exported:
    """A copy of the export."""
    return whole._replace(directory=Path(shutil.copytree(whole.directory, tmp_path / "export")))


def _import_and_export(rank: int, world_size: int, values: dict[str, Any]) -> None:
    config = validate_config(values, "test")
    import_model(config)
    export(config, None, config.trainer.output_dir / "export")


def _verify(rank: int, world_size: int, exported: Exported, free_bytes: int | None) -> tuple[int, str]:
    """Status and output of the command, where `free_bytes` are free if given."""
    if free_bytes is not None:
        memory = psutil.virtual_memory()._replace(available=free_bytes)
        psutil.virtual_memory = lambda: memory
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        status = cli.main(["convert", "verify", str(exported.config), "--model-dir", str(exported.directory)])
    return status, printed.getvalue()


def verified(exported: Exported, free_bytes: int | None = None, world_size: int = 1) -> tuple[int, str]:
    """Of the first rank; the others end well and print nothing."""
    first, *others = run_ranks(_verify, world_size, exported, free_bytes, timeout_s=120)
    assert others == [(0, "")] * (world_size - 1)
    return first


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_compared_is_said(exported: Exported, world_size: int) -> None:
    status, printed = verified(exported, world_size=world_size)
    names, difference = printed.splitlines()[-2:]
    assert status == 0 and names == f"all {len(Checkpoint(exported.directory).names)} tensors are there; 1 file fits its checksum"
    assert float(difference.rsplit(":", 1)[1]) < 1e-5


def test_missing_checksums_are_said(exported: Exported) -> None:
    (exported.directory / "XXH128SUMS").unlink()
    status, printed = verified(exported)
    assert status == 0 and f"no file was compared with a checksum: {exported.directory} lists none" in printed
    status, printed = verified(exported, free_bytes=1000)
    assert status == 2 and f"{exported.directory} has no XXH128SUMS, and log-probs take" in printed and printed.count("error:") == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_that_does_not_fit_is_not_loaded(exported: Exported, world_size: int) -> None:
    """The model's parameters take four bytes each; a tenth more is wanted. Files and names are compared all the same."""
    needed = int(1.1 * sum(tensor.nbytes for tensor in load_file(exported.directory / "model.safetensors").values()))
    status, printed = verified(exported, needed, world_size)
    assert status == 0 and "largest difference of a log-prob" in printed
    status, printed = verified(exported, needed - 1, world_size)
    assert status == 0 and "1 file fits its checksum" in printed and "largest difference" not in printed
    assert printed.splitlines()[-1].startswith("log-probs were not compared: transformers needs 0.0 GiB")
    (exported.directory / "model.safetensors").write_bytes(b"")
    status, printed = verified(exported, needed - 1)
    assert status == 2 and "model.safetensors" in printed and printed.count("error:") == 1


def _set(**fields: Any) -> Callable[[Path], object]:
    return lambda config: config.write_text(json.dumps(json.loads(config.read_text()) | fields))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "not JSON": (lambda config: config.write_text("{"), "config.json: JSONDecodeError"),
    "missing": (Path.unlink, "no config.json there"),
    "another size": (_set(hidden_size=96), "config.json is not that of the checkpoint's model: hidden_size is 96 instead of 64; export it again"),
    "another type": (_set(model_type="qwen9"), "model_type 'qwen9' has no weight mapping"),
    "a wrong value": (_set(num_attention_heads="many"), "num_attention_heads"),
    "what transformers loads besides": (lambda config: config.with_name("generation_config.json").write_text("[]"), "transformers cannot load"),
}


@pytest.mark.parametrize(("change", "told"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_configuration_ends_in_one_message(exported: Exported, change: Callable[[Path], object], told: str) -> None:
    change(exported.directory / "config.json")
    status, printed = verified(exported)
    assert status == 2 and told in printed and str(exported.directory) in printed
    assert printed.count("error:") == 1 and "Traceback" not in printed
