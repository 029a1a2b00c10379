"""From a configuration to a finished run."""

from __future__ import annotations

from otb_megatron.config import Config
from otb_megatron.mcore.parallel import world
from otb_megatron.telemetry.console import summary_table
from otb_megatron.telemetry.report import write_report
from otb_megatron.trainer.driver import found_by_all
from otb_megatron.trainer.loop import train
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import Task, validate


def run(config: Config, task: Task) -> None:
    """Validates, trains (or resumes), exports, and reports. Every rank of the run calls it.

    A run that a signal stops is saved, says so in one line, and returns; it neither exports nor reports.
    """
    rank, world_size = world()
    with found_by_all(rank):
        model = validate(config, task, world_size)
    output_dir, num_steps = config.trainer.output_dir, config.trainer.num_steps
    with Run(config, task, model) as assembled:
        is_driver, finished = assembled.parallel.is_driver, assembled.finished
        stopped = None if finished else train(assembled)
        if not stopped and (not finished or not assembled.driver.share("whether there is an export", (output_dir / "export").is_dir())):
            assembled.learner.export(output_dir / "export")
    if not is_driver:
        return
    if stopped:
        print(f"stopped by {stopped.signal} after step {stopped.step} of {num_steps}: saved {stopped.directory}; the same command continues from there")
        return
    if finished:
        print(f"{output_dir} has all {num_steps} steps already; set a higher trainer.num_steps to continue it")
    report = write_report(output_dir)
    if config.telemetry.progress:
        rows = [("checkpoint", output_dir / "checkpoints" / "latest"), ("export", output_dir / "export"), ("report", report)]
        summary_table(rows + ([("tensorboard", output_dir / "tensorboard")] if config.telemetry.tensorboard else []))
