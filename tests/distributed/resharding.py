"""A run that continues another one's checkpoint in another parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.training import NUM_STEPS, Outcome, largest_difference, record_samples, settings, train
from tests.models import VOCAB_SIZE, make_model

TOLERANCE = 1e-6  # of the largest value of each weight after the step; float32 sums in another order


def save_at(work: Path, kind: str, world_size: int, parallel: dict[str, Any], **changes: Any) -> Outcome:
    """Trains a model of `kind` (with `changes` of its configuration) in `work`, saving after every step."""
    make_model(work / "model", kind, **changes)
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE)
    return train(_settings(work, work / "whole", parallel), world_size)


def assert_continues_at(work: Path, output_dir: Path, whole: Outcome, world_size: int, parallel: dict[str, Any]) -> None:
    """Continues before the last step of the run in `work`: that step's gradient norm and the weights after it are those of that run."""
    saved = f"step_{NUM_STEPS - 1:08d}"
    checkpoints = output_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / saved).symlink_to(work / "whole" / "checkpoints" / saved)
    (checkpoints / "latest").write_text(saved + "\n")
    outcome = train(_settings(work, output_dir, parallel), world_size)
    assert [step["step"] for step in outcome.metrics] == [NUM_STEPS]
    assert abs(outcome.metrics[0]["optimizer/grad_norm"] / whole.metrics[-1]["optimizer/grad_norm"] - 1) < 2e-6
    assert largest_difference(outcome.weights, whole.weights) < TOLERANCE


def _settings(work: Path, output_dir: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    return settings(
        work / "model",
        work,
        parallel=parallel,
        trainer={"output_dir": str(output_dir)},
        optimizer={"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "lr_decay_steps": 10},
        checkpoint={"interval": 1, "keep_last": 10},
    )
