"""Services that metrics are sent to. The only imports of TensorBoard, W&B and MLflow are here, each where it is asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import yaml

from otb_megatron.types import UserError


class Sink(Protocol):
    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None:
        """Flushes. `failed` says that the run ended with an exception."""


class TensorBoard:
    """Event files in `directory`. A resumed run hides the steps that the aborted one wrote from `first_step` on."""

    def __init__(self, directory: Path, first_step: int, resolved_config: dict[str, Any] | None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, and only the driver needs it

        self._writer = SummaryWriter(str(directory), purge_step=first_step)
        if resolved_config is not None:
            text = yaml.safe_dump(resolved_config, sort_keys=False)
            self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()), first_step)  # indented: code in Markdown

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # the writer's own interval is two minutes, lost when the process is killed

    def close(self, failed: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run for each process, grouped by the name of the output directory.

    A resumed run is a new W&B run of the same group: W&B drops points at steps that it already has, so the aborted
    run's values would stay in the curve in place of the ones that count.
    """

    def __init__(self, project: str, output_dir: Path, first_step: int, resolved_config: dict[str, Any] | None) -> None:
        wandb = _optional_module("wandb", "telemetry.wandb_project")
        name, group = _run_name(output_dir, first_step), output_dir.resolve().name
        self._run = wandb.init(project=project, name=name, group=group, dir=str(output_dir), config=resolved_config)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """One MLflow run for each process, with the settings as parameters `section.key`. Sent in the background: a slow server delays no step."""

    def __init__(self, tracking_uri: str, output_dir: Path, first_step: int, resolved_config: dict[str, Any] | None) -> None:
        self._mlflow = _optional_module("mlflow", "telemetry.mlflow_tracking_uri")
        self._mlflow.set_tracking_uri(tracking_uri)
        self._mlflow.start_run(run_name=_run_name(output_dir, first_step), tags={"output_dir": str(output_dir)})
        if resolved_config is not None:
            self._mlflow.log_params(_flatten(resolved_config))

    def write(self, step: int, values: dict[str, float]) -> None:
        self._mlflow.log_metrics(values, step=step, synchronous=False)

    def close(self, failed: bool) -> None:
        self._mlflow.flush_async_logging()
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


def _run_name(output_dir: Path, first_step: int) -> str:
    name = output_dir.resolve().name
    return name if first_step <= 1 else f"{name} from step {first_step}"


def _optional_module(package: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{setting} is set, but `import {package}` fails ({error}); run `pip install {package}`, or set {setting}=null") from error


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= _flatten(value, f"{prefix}{key}.")
        else:
            leaves[prefix + key] = value
    return leaves
