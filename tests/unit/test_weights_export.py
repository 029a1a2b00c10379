"""A Hugging Face directory written from a stream: complete, readable by safetensors, continued after a kill, rolled back after an error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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


def test_all_of_the_tokenizer_and_its_templates_come_along(tmp_path: Path) -> None:
    """And nothing else. An export with them can be replaced by one without, and their modes do not matter."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    model = tmp_path / "model"
    carried = ["added_tokens.json", "additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json"]
    carried += ["merges.txt", "special_tokens_map.json", "tekken.json", "tokenizer.model", "vocab.json", "vocab.txt"]
    (model / "additional_chat_templates").mkdir()
    for name in (*carried, "additional_chat_templates/notes.txt", "notes.txt"):
        (model / name).write_text(f"of {name}")
        (model / name).chmod(0o444)
    export(tmp_path, tensors).write(tensors.items())
    found = contents(tmp_path / "out")
    own = {path.name for path in model.iterdir() if path.is_file() and path.name not in ("model.safetensors", "notes.txt")}
    assert {name for name in found if "safetensors" not in name and name != "XXH128SUMS"} == own | set(carried)
    assert all(found[name] == f"of {name}".encode() for name in carried)
    assert all(path.stat().st_mode & 0o200 for path in (tmp_path / "out").rglob("*"))
    for name in carried:
        (model / name).unlink()
    export(tmp_path, tensors).write(tensors.items())
    assert not contents(tmp_path / "out").keys() & set(carried)


def test_the_configuration_has_one_dtype(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "bfloat16", "dtype": "float16"}))
    export(tmp_path, tensors).write(tensors.items())
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["dtype"] == "float32" and "torch_dtype" not in exported


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


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def earlier_export(tmp_path: Path) -> dict[str, bytes]:
    """One of another model at `out`: its files."""
    tensors = make_model(tmp_path / "earlier", "qwen3", seed=1).state_dict()
    export(tmp_path, tensors, source=tmp_path / "earlier", max_file_bytes=200_000).write(tensors.items())
    shutil.rmtree(tmp_path / "earlier")
    return contents(tmp_path / "out")


def test_a_failing_export_leaves_the_old_one(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    earlier = earlier_export(tmp_path)

    def fails():
        yield next(iter(tensors.items()))
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        export(tmp_path, tensors).write(fails())
    assert contents(tmp_path / "out") == earlier and not (tmp_path / "out.partial").exists()


def test_a_failure_at_the_last_rename_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    earlier = earlier_export(tmp_path)
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == "out.partial":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UserError, match="Input/output error; what was there before is as it was"):
        export(tmp_path, tensors).write(tensors.items())
    assert contents(tmp_path / "out") == earlier
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    monkeypatch.undo()
    export(tmp_path, tensors).write(tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    assert all(torch.equal(Checkpoint(tmp_path / "out").get(name), tensor) for name, tensor in tensors.items())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == Checkpoint(tmp_path / "out").check()  # none of the earlier one's files


def test_a_tensor_that_was_not_described_is_an_error(tmp_path: Path) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(RuntimeError, match="was described"):
        export(tmp_path, tensors).write(reversed(tensors.items()))
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def place_exports(tmp_path: Path) -> None:
    """An export at `out`, an interrupted one at `out.partial`, and at `out.replaced` what a killed one had moved away."""
    earlier_export(tmp_path)
    shutil.copytree(tmp_path / "out", tmp_path / "out.replaced")
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(Killed):
        export(tmp_path, tensors).write(interrupted(tensors, 17))


def add(name: str) -> Callable[[Path], object]:
    def write(place: Path) -> None:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("years")

    return write


def test_it_replaces_earlier_exports(tmp_path: Path) -> None:
    """Also where one was killed at its very beginning, before it could note anything."""
    place_exports(tmp_path)
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    export(tmp_path, tensors).write(tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.replaced").mkdir()
    export(tmp_path, tensors).write(tensors.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"] and Checkpoint(tmp_path / "out").check() > 1


def unmark(place: Path) -> None:
    for name in ("XXH128SUMS", "progress.json"):
        (place / name).unlink(missing_ok=True)


FOREIGN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (add("notes.txt"), "notes.txt"),
    "an adapter": (add("adapter/a.safetensors"), "adapter/"),
    "a training checkpoint": (add("checkpoints/latest"), "checkpoints/"),
    "beside the templates": (add("additional_chat_templates/notes.txt"), "additional_chat_templates/notes.txt"),
    "weights of another name": (add("consolidated.safetensors"), "consolidated.safetensors"),
    "not an export": (unmark, "chat_template.jinja|model-00001-of-"),
}


@pytest.mark.parametrize("name", ["out", "out.partial", "out.replaced"])
@pytest.mark.parametrize(("change", "told"), FOREIGN.values(), ids=FOREIGN.keys())
def test_what_no_export_wrote_is_not_removed(tmp_path: Path, name: str, change: Callable[[Path], object], told: str) -> None:
    place_exports(tmp_path)
    change(tmp_path / name)
    before = contents(tmp_path)
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(UserError, match=f"{name} holds what is not an earlier export: ({told}).*; name another directory, or move that away"):
        export(tmp_path, tensors)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "sums", ["", "0123  notes.txt\n", "0123  model.safetensors\n4567  notes.txt\n", b"\xff\xfe"], ids=["empty", "other", "more", "not text"]
)
def test_the_checksums_of_another_program_make_no_export(tmp_path: Path, sums: str | bytes) -> None:
    """Each directory is a model with what may be somebody's own list."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    shutil.copytree(tmp_path / "model", tmp_path / "out")
    (tmp_path / "out" / "XXH128SUMS").write_bytes(sums if isinstance(sums, bytes) else sums.encode())
    with pytest.raises(UserError, match="out holds what is not an earlier export"):
        export(tmp_path, tensors)


@pytest.mark.parametrize("name", ["out", "out.partial", "out.replaced"])
@pytest.mark.parametrize("inside", ["", "inner"])
def test_it_does_not_replace_its_source(tmp_path: Path, name: str, inside: str) -> None:
    """Nor an earlier export that the source is one of, or whose files it links to."""
    place_exports(tmp_path)
    tensors = make_model(tmp_path / name / inside, "qwen3").state_dict()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / name / inside)
    of_links = tmp_path / "of_links"
    of_links.mkdir()
    for file in (tmp_path / name / inside).glob("*.*"):
        (of_links / file.name).symlink_to(file)
    before = contents(tmp_path)
    for source in (tmp_path / name / inside, link, of_links):
        with pytest.raises(UserError, match=f"would replace {tmp_path / name}, and with it the model it comes from, {source}; name another directory"):
            export(tmp_path, tensors, source=source)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out.partial", "out.replaced"])
def test_a_file_in_its_place_is_named(tmp_path: Path, name: str) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    (tmp_path / name).write_text("years")
    with pytest.raises(UserError, match=f"{name} is not a directory"):
        export(tmp_path, tensors)
    assert (tmp_path / name).read_text() == "years"


def test_a_link_stays_one(tmp_path: Path) -> None:
    """To a directory that is not there yet, and then to an earlier export."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    (tmp_path / "out").symlink_to("disk/real")
    for _ in range(3):
        export(tmp_path, tensors).write(tensors.items())
        assert (tmp_path / "out").is_symlink() and Checkpoint(tmp_path / "disk" / "real").check() > 1
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "model", "out"]


def test_the_working_directory_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    Export(Path("."), described(tensors), source=tmp_path / "model", dtype=torch.float32).write(tensors.items())
    assert Checkpoint(tmp_path / "out").check() == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 1000),
    "gone": Path.unlink,
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_finished_file_that_was_damaged_is_written_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """The files before it are kept, it and those after it come anew."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    with pytest.raises(Killed):
        export(tmp_path, tensors, identity="step 7").write(interrupted(tensors, 17))
    *_, damaged, _ = json.loads((tmp_path / "out.partial" / "progress.json").read_text())["checksums"]
    whole = export(tmp_path, tensors, identity="step 7").num_done
    damage(tmp_path / "out.partial" / damaged)
    continued = export(tmp_path, tensors, identity="step 7")
    assert 0 < continued.num_done < whole - 1
    continued.write(list(tensors.items())[continued.num_done :])
    exported = Checkpoint(tmp_path / "out")
    assert exported.check() > 1 and all(torch.equal(exported.get(name), tensor) for name, tensor in tensors.items())


def test_what_it_calls_finished_has_reached_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file as it is when the progress that names it appears, when that goes, and when the directory's name appears; then that name itself."""
    tensors = make_model(tmp_path / "model", "qwen3").state_dict()
    on_disk: dict[int, int] = {}  # inode -> bytes
    noted = []
    fsync, replace, rename, unlink = os.fsync, os.replace, Path.rename, Path.unlink

    def synced(path: Path) -> bool:
        return on_disk.get(path.stat().st_ino) == path.stat().st_size

    def watch_fsync(descriptor: int) -> None:
        fsync(descriptor)
        on_disk[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    def watch_replace(temporary: Path, path: Path) -> None:
        files = json.loads(temporary.read_text())["checksums"]
        noted.append(len(files))
        assert synced(temporary) and all(synced(path.parent / file) for file in files)
        replace(temporary, path)

    def watch_unlink(path: Path, missing_ok: bool = False) -> None:
        assert path.name == "progress.json" and all(map(synced, (path.parent, *path.parent.iterdir())))
        on_disk.pop(path.parent.stat().st_ino)
        unlink(path, missing_ok)

    def watch_rename(path: Path, target: Path) -> Path:
        assert all(map(synced, (path, *path.iterdir())))
        on_disk.pop(path.parent.stat().st_ino, None)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "replace", watch_replace)
    monkeypatch.setattr(Path, "rename", watch_rename)
    monkeypatch.setattr(Path, "unlink", watch_unlink)
    export(tmp_path, tensors).write(tensors.items())
    assert noted == list(range(len(list((tmp_path / "out").glob("*.safetensors"))) + 1))
    assert synced(tmp_path)
