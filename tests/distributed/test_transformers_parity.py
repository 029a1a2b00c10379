"""Statistics of the policy in Megatron against transformers in float64, and weights out of Megatron against those that went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.algorithms import energy
from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import statistics
from otb_megatron.rollout.recording import load_rollouts
from otb_megatron.trainer.batch import distribute, gather_statistics
from otb_megatron.trainer.driver import Driver
from otb_megatron.types import Trajectories
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint, write_checkpoint
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import CONFIGS, VOCAB_SIZE, make_model

TEMPERATURE = 0.7
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": dict(tensor_model_parallel_size=2),
    "tp2_sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "pp2": dict(pipeline_model_parallel_size=2),
    "cp2": dict(context_parallel_size=2),
    "ep2": dict(expert_model_parallel_size=2),
}


def _statistics_and_export(rank: int, world_size: int, values: dict[str, Any], export_dir: Path) -> tuple[Tensor, Tensor, Tensor] | None:
    config = validate_config(values, "test")
    hf = load_model(config.model.path)
    parallel = start_parallel(config.parallel, seed=0, deadline_s=60)
    driver = Driver(parallel)
    model = build_model(config, hf, parallel)
    load_weights(model, Checkpoint(hf.path))
    assert config.rollout.replay_dir is not None
    trajectories = Trajectories.from_samples(load_rollouts(config.rollout.replay_dir, 1)) if driver.is_driver else None
    batch = distribute(trajectories, config, parallel, driver)
    found = gather_statistics(batch, statistics(model, model.wrapped_chunks(), batch.microbatches[0], TEMPERATURE), driver)
    weights = FullWeights(model)
    if driver.is_driver:
        described = [(name, shape) for name, _, shape in weights.metadata()]
        write_checkpoint(export_dir, weights.tensors(), source=hf.path, dtype=weights.dtype, max_shard_bytes=200_000)
        assert dict(described).keys() == Checkpoint(export_dir).names
        assert all(Checkpoint(export_dir).shape(name) == shape for name, shape in described)
    else:
        assert list(weights.tensors()) == []
    stop_parallel()
    return None if found is None else (found.log_prob, found.entropy, energy(found))


def _oracle(model_dir: Path, trajectories: Trajectories) -> tuple[Tensor, Tensor, Tensor]:
    """log-prob, entropy and ||e_y - pi||^2 by their definitions, one unpadded sample at a time."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, experts_implementation="eager").eval()
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for sample in range(trajectories.num_samples):
        first, last = trajectories.token_offsets[sample], trajectories.token_offsets[sample + 1]
        tokens = trajectories.tokens[first:last]
        positions = trajectories.action_positions[trajectories.action_offsets[sample] : trajectories.action_offsets[sample + 1]] - first
        with torch.no_grad():
            log_pi = torch.log_softmax(model(tokens[None]).logits[0, positions - 1] / TEMPERATURE, -1)
        chosen = torch.nn.functional.one_hot(tokens[positions], log_pi.size(-1))
        columns.append(((log_pi * chosen).sum(-1), -(log_pi.exp() * log_pi).sum(-1), (chosen - log_pi.exp()).square().sum(-1)))
    return tuple(torch.cat(column) for column in zip(*columns, strict=True))  # type: ignore[return-value]


def _case(kind: str, layout: str) -> bool:
    """MoE models need sequence parallelism under TP, and expert parallelism needs experts."""
    moe = "moe" in kind
    return not (layout == "tp2" and moe) and not (layout == "ep2" and not moe)


CASES = [(kind, layout) for kind in CONFIGS for layout in LAYOUTS if _case(kind, layout)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("models")
    for kind in CONFIGS:
        make_model(work / kind, kind)
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)
    return work


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_statistics_equal_transformers_and_weights_come_out_as_they_went_in(models: Path, tmp_path: Path, kind: str, layout: str) -> None:
    values = settings(models / kind, models, parallel=LAYOUTS[layout])
    found = run_ranks(_statistics_and_export, 2, values, tmp_path / "export", timeout_s=240)[0]
    expected = _oracle(models / kind, Trajectories.from_samples(load_rollouts(models / "rollouts", 1)))
    for name, got, want in zip(("log_prob", "entropy", "energy"), found, expected, strict=True):
        assert float((got - want).abs().max()) < 5e-5, name
    original = load_file(models / kind / "model.safetensors")
    exported = Checkpoint(tmp_path / "export")
    assert exported.names == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported.get(name), tensor), name
