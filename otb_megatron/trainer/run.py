"""A run put together: model, samples, engines and records, from one configuration."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from otb_megatron.config import Config
from otb_megatron.data.sources import PromptSet
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.telemetry.recorder import Recorder
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.driver import Driver, tell
from otb_megatron.trainer.learner import Learner
from otb_megatron.trainer.reward_shaping import RewardShaping
from otb_megatron.trainer.saver import Saver
from otb_megatron.trainer.source import Demonstrations, Engines, Evaluation, Recording, Rollouts, Source, read_prompts
from otb_megatron.trainer.validate import Task, load_critic, trained_networks
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel


class Run:
    """Everything the loop works with. Building and leaving it is collective over the world.

    On ranks other than the driver, `source`, `engines`, `evaluation` and `recorder` are None.
    """

    def __init__(self, config: Config, task: Task, hf: HuggingFaceModel, engines: Engines | None = None) -> None:
        """`engines`: running ones to sample with, which the caller closes; None starts the run's own where it needs some."""
        self.config, self.task = config, task
        self.timer = PhaseTimer()
        self.step_started = time.perf_counter()
        self.shaping = RewardShaping(config)
        self.source: Source | None = None
        self.engines = engines
        self.evaluation: Evaluation | None = None
        self.recorder: Recorder | None = None
        self._open = ExitStack()
        self._open.callback(stop_parallel)
        self.parallel = start_parallel(
            config.parallel,
            seed=config.trainer.seed,
            deadline_s=config.trainer.deadline_s,
            deterministic=bool(config.megatron.get("deterministic_mode")),
        )
        self.driver = Driver(self.parallel)
        try:
            # What a user may have got wrong comes first: building the model and starting engines take a while.
            prompts = self.driver.run("reading the data", self._read_prompts)
            resume_from = self.driver.share("the checkpoint to resume from", self.driver.run("looking for a checkpoint", lambda: self._resume_from(hf)))
            state: dict[str, Any] = checkpoint.read_state(resume_from) if resume_from else {}
            self.first_step = state.get("step", 0) + 1
            imported = resume_from if "weights_only" in state else None
            self.learner = Learner(config, task, hf, self.parallel, self.driver, imported)
            self._open.callback(self.learner.close)
            if resume_from is not None and imported is None:
                self.learner.restore(resume_from)
            self.driver.run("starting the rollout engines", lambda: self._start_driver(state, prompts))  # type: ignore[arg-type]
            self.has_engines = self.driver.share("whether engines run", self.engines is not None)
            self.saver = Saver(config, self.learner, self.driver, resume_from)  # after the engines: Ray sets handlers of signals too
            self._open.callback(self.saver.close)
        except BaseException as error:
            self.__exit__(type(error), error)
            raise

    @property
    def finished(self) -> bool:
        """Whether the checkpoint holds the last step already."""
        return self.first_step > self.config.trainer.num_steps

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the driver, but for the step; nothing on the other ranks."""
        if self.source is None:
            return {}
        return {
            "task": self.task,
            "networks": self.learner.identity,
            "order": self.source.order.state_dict(),
            "reward_shaping": self.shaping.state_dict(),
        }

    def _read_prompts(self) -> tuple[PromptSet, PromptSet | None]:
        data = self.config.data
        evaluates = data.validation is not None and self.task == "train" and self.config.rollout.replay_dir is None
        return read_prompts(self.config, data.train), read_prompts(self.config, data.validation) if evaluates else None  # type: ignore[arg-type]

    def _resume_from(self, hf: HuggingFaceModel) -> Path | None:
        """The checkpoint to continue from, checked against this run."""
        config = self.config
        if config.trainer.resume == "never":
            return None
        directory = checkpoint.latest(config.trainer.output_dir / "checkpoints")
        if directory is None:
            return None
        state = checkpoint.read_state(directory)
        if "task" in state and state["task"] != self.task:
            raise UserError(f"{directory} is a checkpoint of `{state['task']}`, not of `{self.task}`; set another trainer.output_dir")
        networks = trained_networks(config, self.task)
        if "weights_only" in state:  # an import: optimizers, and the critic where there is one, start anew
            checkpoint.check_model(directory, state["networks"]["policy"]["model"], hf)
            return directory
        if state["networks"].keys() != networks.keys():
            raise UserError(
                f"{directory} holds {' and '.join(state['networks'])}, and algorithm.advantage={config.algorithm.advantage} trains {' and '.join(networks)}; "
                "continue with the same kind of estimator, or set another trainer.output_dir"
            )
        for name, network in networks.items():
            checkpoint.check_model(directory, state["networks"][name]["model"], hf if name == "policy" else load_critic(config))
            saved = state["networks"][name]["use_distributed_optimizer"]
            if saved != network.optimizer.use_distributed_optimizer:
                raise UserError(f"{directory} was written with {network.section}.use_distributed_optimizer={saved}; continue with the same setting")
        return directory

    def _start_driver(self, state: dict[str, Any], prompts: tuple[PromptSet, PromptSet | None]) -> None:
        config = self.config
        training, validation = prompts
        if self.finished:
            return
        try:
            config.trainer.output_dir.mkdir(parents=True, exist_ok=True)
            config.save(config.trainer.output_dir / "config.yaml")
        except OSError as error:
            raise UserError(f"cannot write to trainer.output_dir={config.trainer.output_dir}: {error}") from error
        if self.task == "sft":
            self.source = Demonstrations(config, training)
        elif config.rollout.replay_dir is not None:
            self.source = Recording(config, training)
        else:
            if self.engines is None:
                self.engines = Engines(config, load_weights=False, first_step=self.first_step)
                self._open.callback(self.engines.close)
            self.source = Rollouts(config, self.engines, training)
            self.evaluation = Evaluation(self.engines, validation) if validation else None
        if "order" in state:  # an imported model has none yet
            self.source.order.load_state_dict(state["order"])
            self.shaping.load_state_dict(state["reward_shaping"])
        self.recorder = Recorder(
            config.telemetry,
            config.trainer.output_dir,
            num_steps=config.trainer.num_steps,
            first_step=self.first_step if self.first_step > 1 else 0,
            resolved_config=config.model_dump(mode="json"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Tells what went wrong, then ends records, engines and groups, each whatever becomes of the others."""
        tell(error, self.parallel.rank)
        if self.recorder is not None:
            recorder = self.recorder
            self._open.callback(lambda: recorder.close(failed=kind is not None))
        self._open.close()
