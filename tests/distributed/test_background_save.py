"""A checkpoint in the background holds what was there when the save began, whatever training does meanwhile, and needs no process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from otb_megatron.config import validate as validate_config
from otb_megatron.mcore import checkpoint
from otb_megatron.trainer.loop import train
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model


def _tensors(run: Run) -> list[Tensor]:
    """Every parameter and every moment of this rank, as they are used in training."""
    parameters = [parameter for chunk in run.learner.model.chunks for parameter in chunk.parameters()]
    inner = run.learner.networks["policy"].optimizer.megatron.chained_optimizers[0].optimizer.state.values()
    return parameters + [state[name] for state in inner for name in ("exp_avg", "exp_avg_sq")]


def _save_while_everything_changes(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    config = validate_config(values, "test")
    gate, write_files = threading.Event(), checkpoint.Writing._write_files

    def wait_and_write(self: Any, *args: Any) -> None:
        assert gate.wait(60)
        write_files(self, *args)

    with Run(config, "train", validate(config, "train", world_size)) as run:
        gate.set()
        train(run)
        gate.clear()
        checkpoint.Writing._write_files = wait_and_write  # type: ignore[method-assign]
        before = [tensor.detach().clone() for tensor in _tensors(run)]
        writing = run.learner.start_save(2)
        with torch.no_grad():
            for tensor in _tensors(run):
                tensor.add_(1.0)
        was_written = writing.is_written
        gate.set()
        run.learner.complete_save(writing, {"step": 2, **run.state}, is_best=False)
        children = len(psutil.Process().children())
        run.learner.restore(checkpoint.directory_of(run.learner.checkpoints, 2))
        differences = [float((tensor - old).abs().max()) for tensor, old in zip(_tensors(run), before, strict=True)]
    return {"largest difference": max(differences), "tensors": len(differences), "was written": was_written, "children": children}


@pytest.mark.parametrize("use_distributed_optimizer", [True, False])
def test_training_on_does_not_change_what_is_written(tmp_path: Path, use_distributed_optimizer: bool) -> None:
    """The writer starts after every weight and moment was changed in place; the restored ones are those from before, bit for bit."""
    make_model(tmp_path / "model", "qwen3_tied")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE)
    values = settings(
        tmp_path / "model",
        tmp_path,
        trainer={"num_steps": 1},
        checkpoint={"async_save": True},
        optimizer={"use_distributed_optimizer": use_distributed_optimizer},
    )
    (found,) = run_ranks(_save_while_everything_changes, 1, values, timeout_s=250)
    assert found["tensors"] > 40
    assert found == {"largest difference": 0.0, "tensors": found["tensors"], "was written": False, "children": 0}
