"""Hugging Face to a training checkpoint and back, over parallel layouts, and a stream of weights taken up in its middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import load_tensors_metadata
from safetensors.torch import load_file, save_file
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.checksums import checksums
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.trainer.conversion import export, import_model
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import RanksFailed, run_ranks
from tests.distributed.training import largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model


def _import(rank: int, world_size: int, values: dict[str, Any]) -> Path | None:
    return import_model(validate_config(values, "test"))


def _export(rank: int, world_size: int, values: dict[str, Any], directory: Path) -> bool:
    return export(validate_config(values, "test"), None, directory)


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "gae", "kl_coef": 0.1}])
def test_training_from_an_imported_model_equals_training_from_hugging_face(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    """Imported at PP2, trained at TP2, bit for bit: also with a critic and a reference, of which the import holds nothing.

    The import exports what came in, too, at a third layout.
    """
    make_model(tmp_path / "model", "qwen3")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE)

    def run(name: str, **parallel: int) -> dict[str, Any]:
        values = settings(tmp_path / "model", tmp_path, parallel=parallel, algorithm=algorithm)
        return values | {"trainer": values["trainer"] | {"output_dir": str(tmp_path / name)}}

    written = run_ranks(_import, 2, run("imported", pipeline_model_parallel_size=2), timeout_s=120)
    assert written == [tmp_path / "imported" / "checkpoints" / "step_00000000", None]
    assert run_ranks(_export, 1, run("imported"), tmp_path / "export", timeout_s=120) == [True]
    original = load_file(tmp_path / "model" / "model.safetensors")
    exported = Checkpoint(tmp_path / "export")
    assert exported.names == original.keys() and all(torch.equal(exported.get(name), tensor) for name, tensor in original.items())
    assert [path.name for path in written[0].iterdir() if path.is_dir()] == ["policy"]
    assert not [name for name in load_tensors_metadata(str(written[0] / "policy")) if name.startswith("optimizer")]

    direct, imported = train(run("direct", tensor_model_parallel_size=2), 2), train(run("imported", tensor_model_parallel_size=2), 2)
    for ours, theirs in ((imported.weights, direct.weights), (imported.critic, direct.critic)):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert bool(direct.critic) == bool(algorithm)
    assert any(not torch.equal(direct.weights[name], original[name]) for name in original)
    untimed = [[{k: v for k, v in step.items() if not k.startswith("time/")} for step in outcome.metrics] for outcome in (direct, imported)]
    assert untimed[0] == untimed[1]
    with pytest.raises(UserError, match="is there already"):
        import_model(validate_config(run("imported"), "test"))


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_imported_model_continues_in_every_optimizer(tmp_path: Path, dtype: str, distributed: bool) -> None:
    """The import holds no Adam: its master weights are made of the imported ones and its moments are zeros, so the first steps are those of a new run.

    Other weights lie in `model.path` by then, which nobody reads.
    """
    make_model(tmp_path / "model", "qwen3_tied")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE)

    def run(name: str) -> dict[str, Any]:
        values = settings(tmp_path / "model", tmp_path, optimizer={"use_distributed_optimizer": distributed})
        values["model"]["dtype"] = dtype
        return values | {"trainer": values["trainer"] | {"output_dir": str(tmp_path / name), "num_steps": 2}}

    run_ranks(_import, 1, run("imported"), timeout_s=120)
    direct = train(run("direct"), 1)
    make_model(tmp_path / "model", "qwen3_tied", seed=1)
    imported = train(run("imported"), 1)
    assert largest_difference(imported.weights, direct.weights) == 0.0
    assert [step["optimizer/grad_norm"] for step in direct.metrics] == [step["optimizer/grad_norm"] for step in imported.metrics]


def test_an_optimizer_that_is_lost_is_not_taken_for_an_import(tmp_path: Path) -> None:
    """A checkpoint that does not say that it holds weights only ends the run, if it holds nothing else."""
    make_model(tmp_path / "model", "qwen3_tied")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE)
    values = settings(tmp_path / "model", tmp_path)
    (directory,) = run_ranks(_import, 1, values, timeout_s=120)
    state = json.loads((directory / "state.json").read_text())
    assert state.pop("weights_only") is True
    state["networks"]["policy"]["use_distributed_optimizer"] = True
    (directory / "state.json").write_text(json.dumps(state))
    files = json.loads((directory / "checksums.json").read_text()) | checksums(directory, [directory / "state.json"])
    (directory / "checksums.json").write_text(json.dumps(files))
    with pytest.raises(RanksFailed, match=r"cannot load the checkpoint .*step_00000000/policy: .*optimizer"):
        train(values, 1)


def _refused(rank: int, world_size: int, values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        import_model(validate_config(values, "test"))
    return str(caught.value)


def test_a_wrong_shape_is_told_alike_in_every_layout(tmp_path: Path) -> None:
    """Row by row the right ones for TP2 to join: each rank would take half of each tensor."""
    make_model(tmp_path / "model", "qwen3_tied")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for part, num_rows in (("gate", 90), ("up", 102)):
        tensors[f"model.layers.1.mlp.{part}_proj.weight"] = torch.ones(num_rows, 64)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    wrong = "gate_proj.weight has the shape [90, 64] instead of [96, 64]; model.layers.1.mlp.up_proj.weight has the shape [102, 64] instead of [96, 64]\n"
    for world_size in (1, 2):
        told, *elsewhere = run_ranks(_refused, world_size, settings(tmp_path / "model", tmp_path, parallel={"tensor_model_parallel_size": world_size}))
        assert wrong in told and elsewhere == ["rank 0 failed in loading the weights"] * (world_size - 1)


def test_a_truncated_file_is_told_once(tmp_path: Path) -> None:
    """By the rank that tells; at TP2 the ranks look at shapes before they read."""
    make_model(tmp_path / "model", "qwen3_tied")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    told, elsewhere = run_ranks(_refused, 2, settings(tmp_path / "model", tmp_path, parallel={"tensor_model_parallel_size": 2}))
    assert f"cannot read {file}: " in told and "the file is truncated" in told
    assert elsewhere == "rank 0 failed in loading the weights"


def _two_streams(rank: int, world_size: int, values: dict[str, Any], first: int) -> list[list[tuple[str, Tensor]]]:
    config = validate_config(values, "test")
    hf = load_model(config.model.path)
    parallel = start_parallel(config.parallel, seed=0, deadline_s=60)
    model = build_model(config, hf, parallel)
    load_weights(model, Checkpoint(hf.path))
    weights = FullWeights(model)
    streams = [[(name, tensor.clone()) for name, tensor in weights.tensors(start)] for start in (0, first)]
    stop_parallel()
    return streams


@pytest.mark.parametrize("first", [5, 6])
def test_a_stream_starts_at_any_tensor(tmp_path: Path, first: int) -> None:
    """Also between the tensors that one Megatron parameter is made of."""
    make_model(tmp_path / "model", "qwen3")
    values = settings(tmp_path / "model", tmp_path, parallel={"tensor_model_parallel_size": 2})
    (whole, rest), others = run_ranks(_two_streams, 2, values, first, timeout_s=120)
    assert others == [[], []]
    assert [name for name, _ in rest] == [name for name, _ in whole[first:]] and len(rest) > 10
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(rest, whole[first:], strict=True))
