"""The training loop. Every rank runs it; rank 0, the driver, also samples, scores, estimates and records."""

from __future__ import annotations

import time

from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch, distribute, gather_statistics, gather_values, scatter_loss_inputs
from otb_megatron.trainer.estimation import demonstration_inputs, loss_inputs
from otb_megatron.trainer.observation import record_samples
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.saver import Stopped
from otb_megatron.trainer.source import check_samples
from otb_megatron.types import LossInputs, Trajectories


def train(run: Run) -> Stopped | None:
    """Trains from the first step that is not in the checkpoint to `trainer.num_steps`, or until a signal asks to stop."""
    if run.has_engines:
        run.learner.publish(run.engines, version=run.first_step - 1)
        if run.first_step == 1:
            record(run, 0, Metrics())
    for step in range(run.first_step, run.config.trainer.num_steps + 1):
        metrics = Metrics()
        batch = collect(run, step, metrics)
        inputs = estimate(run, step, batch, metrics)
        with run.timer.phase("update"):
            if step > run.config.critic.warmup_steps:
                metrics.merge(run.learner.update(batch, inputs))
            metrics.merge(run.learner.update_critic(batch, inputs))
        if run.has_engines:
            with run.timer.phase("weights"):
                run.learner.publish(run.engines, version=step)
            metrics.maximum("weights/version", step)
        accuracy = record(run, step, metrics)
        with run.timer.phase("checkpoint"):
            stopped = run.saver.after_step(step, run.state, accuracy)
        if stopped:
            return stopped
    return None


def collect(run: Run, step: int, metrics: Metrics) -> Batch:
    """Samples, scores and packs the step's trajectories, and gives every rank its microbatches."""

    def on_driver() -> Trajectories:
        assert run.source is not None
        samples = run.source.collect(step, metrics, run.timer)
        check_samples(samples)
        trajectories = Trajectories.from_samples(samples)
        record_samples(samples, trajectories, metrics, scored=run.task == "train")
        metrics.mean("data/epoch", run.source.order.epoch, 1)
        return trajectories

    trajectories = run.driver.run(f"sampling step {step}", on_driver)
    with run.timer.phase("pack"):
        return distribute(trajectories, run.config, run.parallel, run.driver)


def estimate(run: Run, step: int, batch: Batch, metrics: Metrics) -> list[list[LossInputs]]:
    """Statistics (and values) of every action, gathered to the driver; advantages of every action, scattered back."""
    if run.task == "sft":
        inputs = run.driver.run("weighing", lambda: demonstration_inputs(batch, run.config))
        return scatter_loss_inputs(batch, inputs, run.driver)
    with run.timer.phase("statistics"):
        policy = gather_statistics(batch, run.learner.statistics(batch), run.driver)
        local = run.learner.reference_statistics(batch)
        reference = None if local is None else gather_statistics(batch, local, run.driver)
        local = run.learner.values(batch)
        values = None if local is None else gather_values(batch, local, run.driver)
    with run.timer.phase("advantages"):

        def on_driver() -> LossInputs:
            assert policy is not None
            return loss_inputs(batch, policy, reference.log_prob if reference else None, values, run.config, run.shaping, step, metrics)

        return scatter_loss_inputs(batch, run.driver.run("estimating advantages", on_driver), run.driver)


def record(run: Run, step: int, metrics: Metrics) -> float | None:
    """Measures held-out accuracy where it is due and logs the step, on the driver. Returns what it measured there, None elsewhere.

    A step is logged before it is saved, so that a kill between the two loses no line: a resume repeats the step and its
    line. The time of a checkpoint is therefore part of the following step.
    """
    settings = run.config.trainer
    due = step in (0, settings.num_steps) or (settings.eval_interval and step % settings.eval_interval == 0)

    def on_driver() -> float | None:
        assert run.recorder is not None
        values = metrics.values()
        if run.evaluation is not None and due:
            with run.timer.phase("eval"):
                values |= run.evaluation.accuracy()
        if step > 0:  # what comes before the first step is the start of engines and ranks
            values |= {f"time/{name}": seconds for name, seconds in run.timer.seconds().items()} | {"time/step": time.perf_counter() - run.step_started}
        if values:
            run.recorder.log(step, values)
        run.timer.reset()
        run.step_started = time.perf_counter()
        return values.get("eval/accuracy")

    return run.driver.run(f"evaluating after step {step}", on_driver)
