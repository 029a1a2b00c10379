"""A model in Megatron against transformers in float64 and against its own files, in any parallel layout, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.algorithms import energy
from otb_megatron.config import validate as validate_config
from otb_megatron.mcore.head import StatisticsHead
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.mcore.step import evaluate
from otb_megatron.rollout.recording import load_rollouts
from otb_megatron.trainer.batch import distribute, gather_statistics
from otb_megatron.trainer.driver import Driver
from otb_megatron.types import Trajectories
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.bridge import FindBridge
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import CONFIGS, VOCAB_SIZE, make_model

Statistics = tuple[Tensor, Tensor, Tensor]  # log-prob, entropy and energy, each [actions]

TEMPERATURE = 0.7
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, parallel section, megatron section; every model has 4 layers
    "one": (1, {}, {}),
    "dp2": (2, {}, {}),
    "tp2": (2, dict(tensor_model_parallel_size=2), {}),
    "tp2_sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True), {}),
    "pp2": (2, dict(pipeline_model_parallel_size=2), {}),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), {}),
    "pp2_uneven": (2, dict(pipeline_model_parallel_size=2), dict(num_layers_in_first_pipeline_stage=1)),
    "cp2": (2, dict(context_parallel_size=2), {}),
    "ep2": (2, dict(expert_model_parallel_size=2), {}),
    "tp2_sp_ep2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2), {}),
    "tp2_sp_etp2": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=2), {}),
    "pp4": (4, dict(pipeline_model_parallel_size=4), {}),
    "tp2_pp2_sp": (4, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True), {}),
    "tp2_cp2_sp": (4, dict(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True), {}),
    "ep2_pp2": (4, dict(expert_model_parallel_size=2, pipeline_model_parallel_size=2), {}),
    "ep4": (4, dict(expert_model_parallel_size=4), {}),
}


def applies(kind: str, layout: str) -> bool:
    """MoE models need sequence parallelism under TP, and expert parallelism needs experts; Megatron-Core does not cut experts with biases."""
    if kind == "gpt_oss_moe" and "etp" in layout:
        return False
    return layout != "tp2" if "moe" in kind else "ep" not in layout and "etp" not in layout


def make_models(work: Path) -> None:
    """Every tiny model below `work`, and samples to compare on."""
    for kind in CONFIGS:
        make_model(work / kind, kind)
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)


def check(models: Path, export_dir: Path, kind: str, layout: str, *, on_rank: Callable[..., Statistics | None] | None = None, timeout_s: float = 240) -> None:
    """The model's statistics are those of transformers, and its export holds bit for bit what was imported.

    Args:
        on_rank: what computes them; None for `statistics_and_export`.
    """
    world_size, parallel, megatron = LAYOUTS[layout]
    values = settings(models / kind, models, parallel=parallel, megatron=megatron)
    found = run_ranks(on_rank or statistics_and_export, world_size, values, export_dir, timeout_s=timeout_s)[0]
    expected = _oracle(models / kind, Trajectories.from_samples(load_rollouts(models / "rollouts", 1)))
    for name, got, want in zip(("log_prob", "entropy", "energy"), found, expected, strict=True):
        assert float((got - want).abs().max()) < 5e-5, name
    original = load_file(models / kind / "model.safetensors")
    exported = Checkpoint(export_dir)
    assert exported.names == original.keys()
    for name, tensor in original.items():
        assert torch.equal(exported.get(name), tensor), name


def statistics_and_export(rank: int, world_size: int, values: dict[str, Any], export_dir: Path, find_bridge: FindBridge | None = None) -> Statistics | None:
    config = validate_config(values, "test")
    hf = load_model(config.model.path, find_bridge=find_bridge)
    parallel = start_parallel(config.parallel, seed=0, deadline_s=60)
    driver = Driver(parallel)
    model = build_model(config, hf, parallel)
    load_weights(model, Checkpoint(hf.path))
    assert config.rollout.replay_dir is not None
    trajectories = Trajectories.from_samples(load_rollouts(config.rollout.replay_dir, 1)) if driver.is_driver else None
    batch = distribute(trajectories, config, parallel, driver)
    found = gather_statistics(batch, evaluate(model, model.wrapped_chunks(), batch.microbatches[0], StatisticsHead(hf.vocab_size, TEMPERATURE)), driver)
    weights = FullWeights(model)
    if driver.is_driver:
        Export(export_dir, weights.metadata(), source=hf.path, dtype=weights.dtype, max_file_bytes=200_000).write(weights.tensors())
        assert Checkpoint(export_dir).check() > 1
    else:
        assert list(weights.tensors()) == []
    stop_parallel()
    return None if found is None else (found.log_prob, found.entropy, energy(found))


def _oracle(model_dir: Path, trajectories: Trajectories) -> Statistics:
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
