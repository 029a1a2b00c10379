"""A Hugging Face directory written from a stream: complete, readable by safetensors, continued after a kill, rolled back after an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from otb_megatron.types import UserError
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint
from tests.models import make_model

Tensors = dict[str, Tensor]


def described(tensors: Tensors) -> list:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def export(tmp_path: Path, tensors: Tensors, **options) -> Export:
    options = {"source": tmp_path / "model", "dtype": torch.float32, "max_file_bytes": 100_000} | options
    return Export(tmp_path / "out", described(tensors), **options)


def test_it_is_complete_and_safetensors_reads_it(tmp_path: Path) -> None:
    original = make_model(tmp_path / "model", "qwen3").state_dict()
    seen = []
    export(tmp_path, original).write(original.items(), seen.append)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    exported = Checkpoint(tmp_path / "out")
    assert exported.names == original.keys()
    assert all(torch.equal(exported.get(name), tensor) for name, tensor in original.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out.partial").exists()
    num_bytes = sum(tensor.nbytes for tensor in original.values())
    assert len(seen) == len(original) and seen[-1] == num_bytes == export(tmp_path, original).total_bytes


def test_every_dtype_and_shape_survives(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3")
    tensors = {
        "strided": torch.arange(6.0).reshape(2, 3).t(),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "half": torch.randn(1).half(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "int": torch.tensor([-1, 2**40]),
    }
    export(tmp_path, tensors).write(tensors.items())
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in read.items()} == {name: (t.dtype, t.shape) for name, t in tensors.items()}
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    export(tmp_path, tensors).write(tensors.items())
    lines = (tmp_path / "out" / "XXH128SUMS").read_text().splitlines()
    assert lines == [f"{xxhash.xxh3_128_hexdigest(file.read_bytes())}  {file.name}" for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert Checkpoint(tmp_path / "out").check() == len(lines)
    damaged = tmp_path / "out" / lines[1].split("  ")[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # one bit of the last value
    damaged.write_bytes(content)
    with pytest.raises(UserError, match=f"{damaged.name} is not what was written"):
        Checkpoint(tmp_path / "out").check()


class Killed(BaseException):
    """Stands for the end of the process: nothing that handles errors sees it."""


def interrupted(tensors: Tensors, after: int):
    for number, item in enumerate(tensors.items()):
        if number == after:
            raise Killed
        yield item


def test_a_killed_export_is_continued(tmp_path: Path) -> None:
    """Files that were finished are not written again; the one that was not is."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(Killed):
        export(tmp_path, tensors, identity="step 7").write(interrupted(tensors, 17))
    assert not (tmp_path / "out").exists()
    second = export(tmp_path, tensors, identity="step 7")
    assert 0 < second.num_done < 17
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out.partial").glob("*.safetensors")}
    second.write(list(tensors.items())[second.num_done :])
    exported = Checkpoint(tmp_path / "out")
    assert all(torch.equal(exported.get(name), tensor) for name, tensor in tensors.items())
    assert exported.check() > 1 and not (tmp_path / "out" / "progress.json").exists()
    kept = [name for name, time in finished.items() if (tmp_path / "out" / name).stat().st_mtime_ns == time]
    assert len(kept) == len(finished) - 1


@pytest.mark.parametrize("change", [dict(identity="step 8"), dict(max_file_bytes=200_000), dict(identity=None)])
def test_an_export_of_something_else_is_not_continued(tmp_path: Path, change: dict) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(Killed):
        export(tmp_path, tensors, identity="step 7").write(interrupted(tensors, 15))
    assert export(tmp_path, tensors, **dict(identity="step 7") | change).num_done == 0


def test_a_failing_export_leaves_the_old_one(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    make_model(tmp_path / "out", "qwen3", seed=1)
    (tmp_path / "out" / "mine").write_text("kept")

    def fails():
        yield next(iter(tensors.items()))
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        export(tmp_path, tensors).write(fails())
    assert (tmp_path / "out" / "mine").read_text() == "kept" and not (tmp_path / "out.partial").exists()


def test_a_failure_at_the_last_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    make_model(tmp_path / "out", "qwen3", seed=1)
    (tmp_path / "out" / "mine").write_text("kept")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "out.partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="Input/output error; what was there before is as it was"):
        export(tmp_path, tensors).write(tensors.items())
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    monkeypatch.undo()
    export(tmp_path, tensors).write(tensors.items())
    assert not (tmp_path / "out" / "mine").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_a_tensor_that_was_not_described_is_an_error(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(RuntimeError, match="was described"):
        export(tmp_path, tensors).write(reversed(tensors.items()))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_it_replaces_nothing_but_an_export(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match="not an earlier export"):
        export(tmp_path, tensors)
    with pytest.raises(UserError, match="must not replace the model"):
        Export(tmp_path / "model", described(tensors), source=tmp_path / "model", dtype=torch.float32)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years"
