"""A checkpoint takes no host memory beside the state itself, and its files are those that Megatron-Core's own way writes and reads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.mcore import checkpoint
from otb_megatron.trainer.loop import train
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

ALLOWANCE_BYTES = 56 * 2**20  # two pieces of 16 MiB that a checksum reads, and what allocators and Python's objects move


def _peak_bytes(work: Callable[[], Any]) -> int:
    """The highest resident memory of this process during `work`, above that before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # <linux/fs/proc>: the peak starts anew
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024


def _save_and_load(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, int]:
    config = validate_config(values, "test")
    with Run(config, "train", validate(config, "train", world_size)) as run:
        learner = run.learner

        def save(step: int) -> None:
            learner.complete_save(learner.start_save(step), {"step": step, **run.state}, is_best=False)

        save(1)  # imports, and grows what stays
        sizes = [tensor.numel() * tensor.element_size() for chunk in learner.model.chunks for tensor in chunk.parameters()]
        save_bytes = _peak_bytes(lambda: save(2))
        load_bytes = _peak_bytes(lambda: learner.restore(checkpoint.directory_of(learner.checkpoints, 2)))
    return {"parameters": sum(sizes), "largest": max(sizes), "save": save_bytes, "load": load_bytes}


@pytest.mark.parametrize("async_save", [False, True])
def test_memory_of_a_save_and_a_load(tmp_path: Path, async_save: bool) -> None:
    """At two data-parallel ranks: a save needs one tensor, in the background a copy of what the rank writes, and a load one tensor.

    Megatron's own way takes 7.5 times the parameters to save and 3.3 times to load, each about double the limit or more.
    """
    make_model(tmp_path / "model", "qwen3", hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=4, head_dim=64)
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)
    values = settings(tmp_path / "model", tmp_path, checkpoint={"async_save": async_save})
    for rank, found in enumerate(run_ranks(_save_and_load, 2, values, timeout_s=250)):
        # The first rank writes the weights, and each its half of the master weights and both moments.
        own_bytes = found["parameters"] * (rank == 0) + 3 * found["parameters"] // 2
        allowed_bytes = 2 * found["largest"] + ALLOWANCE_BYTES
        assert own_bytes > allowed_bytes  # a copy would be seen
        assert found["load"] < allowed_bytes
        assert found["save"] < allowed_bytes + own_bytes * async_save


def _tensors(run: Run) -> list[Tensor]:
    """Every weight and moment of this rank."""
    weights = [parameter for chunk in run.learner.model.chunks for parameter in chunk.parameters()]
    states = [state for part in _distributed(run) for state in part.optimizer.state.values()]
    return weights + [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def _distributed(run: Run) -> list[DistributedOptimizer]:
    return [part for part in run.learner.networks["policy"].optimizer.megatron.chained_optimizers if isinstance(part, DistributedOptimizer)]


@contextlib.contextmanager
def _megatrons_own_way(parts: list[DistributedOptimizer]) -> Iterator[None]:
    """Takes away what `keep_in_place` has put before Megatron's methods."""
    ours = [(part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable) for part in parts]
    for part in parts:
        del part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable
    yield
    for part, (save, load) in zip(parts, ours, strict=True):
        part.sharded_param_state_fully_reshardable, part.load_parameter_state_from_fully_reshardable = save, load


def _cross(rank: int, world_size: int, values: dict[str, Any]) -> list[float]:
    """The largest difference of what is saved Megatron's way and loaded ours, and the other way round."""
    config = validate_config(values, "test")
    differences = []
    with Run(config, "train", validate(config, "train", world_size)) as run:
        train(run)
        parts = _distributed(run)
        assert len(parts) == 1 + bool(run.learner.model.config.num_moe_experts)  # of dense parameters and of experts
        before = [tensor.detach().clone() for tensor in _tensors(run)]
        ways = [(_megatrons_own_way(parts), contextlib.nullcontext()), (contextlib.nullcontext(), _megatrons_own_way(parts))]
        for step, (saving, loading) in enumerate(ways, start=9):
            with saving:
                run.learner.complete_save(run.learner.start_save(step), {"step": step, **run.state}, is_best=False)
            with torch.no_grad():
                for tensor in _tensors(run):
                    tensor.add_(1.0)
            with loading:
                run.learner.restore(checkpoint.directory_of(run.learner.checkpoints, step))
            differences.append(max(float((tensor - old).abs().max()) for tensor, old in zip(_tensors(run), before, strict=True)))
    return differences


@pytest.mark.parametrize(
    ("kind", "world_size", "parallel"),
    [
        ("qwen3_moe", 2, dict()),
        ("qwen3_moe", 4, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
        ("qwen3_tied", 4, dict(pipeline_model_parallel_size=2)),
    ],
)
def test_files_are_those_of_megatrons_own_way(tmp_path: Path, kind: str, world_size: int, parallel: dict[str, Any]) -> None:
    """At two data-parallel ranks, saved by gathering as Megatron does and loaded in place, and the other way round: bit for bit."""
    make_model(tmp_path / "model", kind)
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)
    values = settings(tmp_path / "model", tmp_path, parallel=parallel, trainer={"num_steps": 1, "resume": "never"}, checkpoint={"interval": 0})
    assert run_ranks(_cross, world_size, values, timeout_s=250) == [[0.0, 0.0]] * world_size
