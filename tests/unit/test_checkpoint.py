"""Which checkpoints remain, what the pointers name, and which ones are refused. The tensors are a file of text here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from otb_megatron.mcore import checkpoint, checksums
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel, load_model
from tests.models import CONFIGS

NETWORKS = {"policy": {"use_distributed_optimizer": True, "model": {"path": "model", "config": {}}}}


def _save(root: Path, step: int, keep_last: int = 2, **options: Any) -> None:
    checkpoint.begin(root, step, {"policy": 1})
    partial = root / f".step_{step:08d}.partial"
    for name in ("__0_0.distcp", "metadata.json"):
        (partial / "policy" / name).write_text(f"{name} of step {step}")
    of_ranks = checksums.checksums(partial, [partial / "policy" / "__0_0.distcp"])
    checkpoint.complete(root, step, {"step": step, "networks": NETWORKS}, of_ranks, keep_last=keep_last, **options)


def _names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_last_ones_and_the_best_remain(tmp_path: Path) -> None:
    for step, is_best in [(1, False), (2, True), (3, False), (4, False), (5, False)]:
        _save(tmp_path, step, is_best=is_best)
    assert _names(tmp_path) == ["best", "latest", "step_00000002", "step_00000004", "step_00000005"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000005" and checkpoint.best(tmp_path) == tmp_path / "step_00000002"
    _save(tmp_path, 6, is_best=True)
    assert _names(tmp_path) == ["best", "latest", "step_00000005", "step_00000006"]


def test_a_return_to_an_earlier_step_forgets_the_later_ones(tmp_path: Path) -> None:
    """The user writes an earlier name into `latest`: the next save removes what came after it, the best included."""
    for step in (1, 2, 3):
        _save(tmp_path, step, keep_last=3, is_best=step == 3)
    (tmp_path / "latest").write_text("step_00000001\n")
    _save(tmp_path, 2, keep_last=3)
    assert _names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_a_return_keeps_the_ancestors_and_forgets_the_steps_between(tmp_path: Path) -> None:
    """Back from 30 to 10, next save at 40: 20 and 30 are no ancestors of 40, and the ancestor 10 is one of the last two."""
    for step in (10, 20, 30):
        _save(tmp_path, step, keep_last=3, is_best=step == 20)
    (tmp_path / "latest").write_text("step_00000010\n")
    _save(tmp_path, 40)
    assert _names(tmp_path) == ["latest", "step_00000010", "step_00000040"]
    _save(tmp_path, 50)
    assert _names(tmp_path) == ["latest", "step_00000040", "step_00000050"]


def test_checkpoints_without_the_pointer_are_refused_and_never_deleted(tmp_path: Path) -> None:
    """`latest` was lost in a copy, or while the run was going on."""
    for step in (40, 80):
        _save(tmp_path, step)
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match=r"holds step_00000040, step_00000080, but no file `latest` .* write one of these names into .*latest, or set another"):
        checkpoint.latest(tmp_path)
    _save(tmp_path, 1, keep_last=1)
    assert _names(tmp_path) == ["latest", "step_00000001", "step_00000040", "step_00000080"]
    (tmp_path / "latest").unlink()
    with pytest.raises(UserError, match="cannot write the checkpoint of step 40"):
        _save(tmp_path, 40)
    assert checkpoint.read_state(tmp_path / "step_00000040")["step"] == 40


@pytest.mark.parametrize("killed_at", ["step_00000007", "latest"])
def test_a_first_save_that_is_killed_leaves_what_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str) -> None:
    """Killed before the checkpoint has its name, there is none; killed after that and before `latest` is there, it is found."""

    class Killed(BaseException):
        pass

    def unless_killed(move: Callable[..., Any]) -> Callable[..., Any]:
        def moved(source: Any, target: Any) -> Any:
            if Path(target).name == killed_at:
                raise Killed
            return move(source, target)

        return moved

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", unless_killed(os.replace))
        patch.setattr(checkpoint.Path, "rename", unless_killed(Path.rename))
        _save(tmp_path, 7)
    assert not (tmp_path / "latest").exists()
    assert checkpoint.latest(tmp_path) == (tmp_path / "step_00000007" if killed_at == "latest" else None)
    _save(tmp_path, 8)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000008"
    assert _names(tmp_path) == ["latest", *(["step_00000007"] if killed_at == "latest" else []), "step_00000008"]


def test_old_checkpoints_that_are_gone_or_stay_do_not_fail_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 1, is_best=True)
    shutil.rmtree(tmp_path / "step_00000001")
    _save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000002"

    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match=r"cannot delete the old checkpoint .*step_00000002: .*Permission denied"):
        _save(tmp_path, 3, keep_last=1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000003"


def test_every_file_has_a_checksum(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    directory = tmp_path / "step_00000001"
    assert json.loads((directory / "checksums.json").read_text()).keys() == {"policy/__0_0.distcp", "policy/metadata.json", "state.json"}
    checksums.check(directory, 0, 1)
    assert checkpoint.read_state(directory) == {"step": 1, "networks": NETWORKS, "format_version": 1}


def test_everything_is_on_the_disk_before_the_checkpoint_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the ranks' own files, which they sync: what Megatron and the driver write, and the directories of all."""
    synced: list[Path] = []
    before: list[set[Path]] = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def noted_rename(source: Path, target: Path) -> Path:
        before.append(set(synced))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(checkpoint.Path, "rename", noted_rename)
    _save(tmp_path, 1)
    partial = tmp_path / ".step_00000001.partial"
    (named,) = before
    assert {partial / "policy" / "metadata.json", partial / "policy", partial / "state.json.partial", partial / "checksums.json.partial", partial} <= named
    assert synced[-1] == tmp_path  # with the names of the checkpoint and of `latest`


@pytest.mark.parametrize("exists", [True, False])
def test_a_save_that_cannot_fit_leaves_nothing(tmp_path: Path, exists: bool) -> None:
    """2^60 parameters of 16 bytes; but what an interrupted save left has made room by then."""
    root = tmp_path / "run" / "checkpoints"
    if exists:
        (root / ".step_00000001.partial" / "policy").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"needs about {2**34}.00 GiB, but {root} has .* GiB free"):
        checkpoint.begin(root, 2, {"policy": 2**60})
    assert sorted(tmp_path.rglob("*")) == ([tmp_path / "run", root] if exists else [])


def test_what_an_interrupted_save_or_deletion_left_goes_and_is_never_a_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path, 1)
    for left in (".step_00000002.partial", ".step_00000000.removed.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "state.json").write_text("{}")
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    _save(tmp_path, 3)
    assert _names(tmp_path) == ["latest", "step_00000001", "step_00000003"]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ('{"step": 1, "format_version": 2}', "has format 2, and this version reads format 1; update, a newer version wrote it"),
        ('{"step": 1, "format_version": 0}', "has format 0, and this version reads format 1; use the older version that wrote it"),
        ('{"step": 1', "cannot read .*state.json"),
        ("[1]", "state.json holds a JSON array instead of an object; restore it, or continue from another checkpoint"),
        ('{"step": 1}', "state.json is damaged, it has format_version=null and networks without the model"),
        ('{"format_version": "2"}', 'it has format_version="2" and step=null and networks'),
        ('{"step": 1, "format_version": 1}', "it has networks without the model and the kind of optimizer of each; restore it"),
        ('{"step": 1, "format_version": 1, "networks": {"policy": {"use_distributed_optimizer": true}}}', "it has networks without the model"),
    ],
)
def test_another_format_and_a_damaged_state_are_refused(tmp_path: Path, written: str, told: str) -> None:
    (tmp_path / "state.json").write_text(written)
    with pytest.raises(UserError, match=told):
        checkpoint.read_state(tmp_path)


def test_another_model_is_refused_by_the_fields_that_differ(tmp_path: Path) -> None:
    """Of another norm epsilon and another width; the versions of transformers that wrote them do not matter."""
    models: list[HuggingFaceModel] = []
    for number, changes in enumerate([{}, {"rms_norm_eps": 0.5, "hidden_size": 8}, {"transformers_version": "1"}]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(CONFIGS["qwen3_tied"].to_dict() | changes))
        models.append(load_model(tmp_path / str(number)))
    saved = checkpoint.identity(models[0])
    checkpoint.check_model(tmp_path, saved, models[0])
    checkpoint.check_model(tmp_path, saved, models[2])
    with pytest.raises(UserError, match=r"another model.*hidden_size was 64 and is now 8; rms_norm_eps was 1e-06 and is now 0.5"):
        checkpoint.check_model(tmp_path, saved, models[1])
