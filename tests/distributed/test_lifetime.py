"""A run that was left leaves nothing behind: experiments train hundreds of models one after the other in one process."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

from otb_megatron.config import validate as validate_config
from otb_megatron.trainer.loop import train
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model


def _train_twice(rank: int, world_size: int, values: dict[str, Any]) -> tuple[list[int], list[bool]]:
    """Threads after each run, and whether its model is still there."""
    config = validate_config(values, "test")
    num_threads, alive = [], []
    for _ in range(2):
        shutil.rmtree(config.trainer.output_dir, ignore_errors=True)
        with Run(config, "train", validate(config, "train", world_size)) as run:
            train(run)
            model = weakref.ref(run.learner.model.chunks[0])
        del run
        gc.collect()
        num_threads.append(len(os.listdir("/proc/self/task")))
        alive.append(model() is not None)
    return num_threads, alive


def test_models_and_the_threads_of_their_groups_end_with_the_run(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3_tied")
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE)
    ((first, second), alive) = run_ranks(_train_twice, 1, settings(tmp_path / "model", tmp_path), timeout_s=240)[0]
    assert alive == [False, False]
    assert second == first
