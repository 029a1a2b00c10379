"""A run put together: model, samples, engines and records, from one configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.telemetry.recorder import Recorder
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.learner import Learner
from otb_megatron.trainer.source import Demonstrations, Engines, Evaluation, Recording, Rollouts, Source
from otb_megatron.trainer.validate import Task
from otb_megatron.weights.architectures import HuggingFaceModel


class Run:
    """Everything the loop works with. Building and leaving it is collective over the world.

    On ranks other than the driver, `source`, `engines`, `evaluation` and `recorder` are None.
    """

    def __init__(self, config: Config, task: Task, hf: HuggingFaceModel) -> None:
        self.config, self.task = config, task
        self.timer = PhaseTimer()
        self.step_started = time.perf_counter()
        self.source: Source | None = None
        self.engines: Engines | None = None
        self.evaluation: Evaluation | None = None
        self.recorder: Recorder | None = None
        self.parallel = start_parallel(config.parallel, seed=config.trainer.seed, deadline_s=config.trainer.deadline_s)
        self.driver = Driver(self.parallel)
        try:
            resume_from = self._resume_from()
            self.learner = Learner(config, hf, self.parallel, self.driver)
            if resume_from is not None:
                self.learner.restore(resume_from)
            state: dict[str, Any] = checkpoint.read_state(resume_from) if resume_from else {}
            self.first_step = state.get("step", 0) + 1
            self.driver.run("starting the rollout engines and reading the data", lambda: self._start_driver(state))
            self.has_engines = self.driver.share("whether engines run", self.engines is not None)
        except BaseException:
            self.close(failed=True)
            raise

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the driver, but for the step."""
        assert self.source is not None
        return {"task": self.task, "order": self.source.order.state_dict()}

    def _resume_from(self) -> Path | None:
        """The checkpoint to continue from. Only the driver looks, so that all ranks agree."""
        root = self.config.trainer.output_dir / "checkpoints"
        found = self.driver.run("looking for a checkpoint", lambda: checkpoint.latest(root) if self.config.trainer.resume == "auto" else None)
        return self.driver.share("the checkpoint to resume from", found)

    def _start_driver(self, state: dict[str, Any]) -> None:
        config = self.config
        config.trainer.output_dir.mkdir(parents=True, exist_ok=True)
        config.save(config.trainer.output_dir / "config.yaml")
        if self.task == "sft":
            self.source = Demonstrations(config)
        elif config.rollout.replay_dir is not None:
            self.source = Recording(config)
        else:
            self.engines = Engines(config, load_weights=False, first_step=self.first_step)
            self.source = Rollouts(config, self.engines)
            self.evaluation = Evaluation(config, self.engines) if config.data.validation else None
        if "order" in state:
            self.source.order.load_state_dict(state["order"])
        self.recorder = Recorder(
            config.telemetry,
            config.trainer.output_dir,
            num_steps=config.trainer.num_steps,
            first_step=self.first_step if state else 0,
            resolved_config=config.model_dump(mode="json"),
        )

    def close(self, *, failed: bool = False) -> None:
        """Ends engines, workers and records; safe to call on a run that was built in part."""
        if self.engines is not None:
            self.engines.close()
        if self.recorder is not None:
            self.recorder.close(failed=failed)
        self.engines = self.recorder = None
        stop_parallel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)
