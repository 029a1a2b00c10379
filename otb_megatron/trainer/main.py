"""From a configuration to a finished run."""

from __future__ import annotations

from otb_megatron.config import Config
from otb_megatron.mcore.parallel import world
from otb_megatron.telemetry.console import summary_table
from otb_megatron.telemetry.report import write_report
from otb_megatron.trainer.loop import train
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import Task, validate


def run(config: Config, task: Task) -> None:
    """Validates, trains (or resumes), exports, and reports. Every rank of the run calls it."""
    _, world_size = world()
    model = validate(config, task, world_size)
    with Run(config, task, model) as assembled:
        is_driver = assembled.parallel.is_driver
        train(assembled)
    if is_driver:
        output_dir = config.trainer.output_dir
        report = write_report(output_dir)
        if config.telemetry.progress:
            rows = [("checkpoint", output_dir / "checkpoints" / "latest"), ("export", output_dir / "export"), ("report", report)]
            summary_table(rows + ([("tensorboard", output_dir / "tensorboard")] if config.telemetry.tensorboard else []))
