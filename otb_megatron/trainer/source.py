"""Where a step's samples come from: the rollout engines, a recording of them, or demonstrations. For the driver only."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from otb_megatron.algorithms import ADVANTAGES
from otb_megatron.config import Config, SourceConfig
from otb_megatron.data.order import PromptOrder
from otb_megatron.data.sources import PromptSet, demonstration_tokens, load_prompts
from otb_megatron.rewards.pool import RewardPool
from otb_megatron.rollout.pool import RolloutPool
from otb_megatron.rollout.recording import load_rollouts, num_prompts_drawn, save_rollouts
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.dynamic_sampling import sample_groups_with_signal
from otb_megatron.types import Prompt, Response, Sample, UserError


class Source(Protocol):
    """Gives the samples of each step."""

    order: PromptOrder

    def collect(self, step: int, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        """The samples of `step`; also records how they are."""


class Engines:
    """The rollout engines with the verifier, serving training samples and evaluation alike."""

    def __init__(self, config: Config, *, load_weights: bool, first_step: int = 1) -> None:
        self._config = config
        self._rewards = RewardPool(config.rewards)  # its workers start while the engines load
        # The engines draw from their own random state, which starts anew with them: after a resume it must not repeat the first steps.
        rollout = config.rollout.model_copy(update={"seed": config.rollout.seed + 1_000 * (first_step - 1)})
        try:
            self.pool = RolloutPool(
                rollout, model_dir=config.model.path, dtype=config.model.dtype, max_prompt_tokens=config.data.max_prompt_tokens, load_weights=load_weights
            )
        except BaseException:
            self._rewards.close()
            raise

    def sample(self, prompts: list[Any], n: int, temperature: float, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        """`n` scored responses to each prompt; a prompt's responses share a group."""
        with timer.phase("rollout"):
            responses = self.pool.generate(prompts, n=n, temperature=temperature, max_response_tokens=self._config.rollout.max_response_tokens, seed=None)
        pairs = [(prompt, response) for prompt, answers in zip(prompts, responses, strict=True) for response in answers]
        with timer.phase("reward"):
            scored = self._rewards.score(pairs)
        metrics.sum("rewards/failures", len(scored.failures))
        return [Sample(prompt, response, group=i // n, reward=reward) for i, ((prompt, response), reward) in enumerate(zip(pairs, scored.rewards, strict=True))]

    def send_weights(self, metadata: list[TensorMetadata], tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.pool.send_weights(metadata, tensors, version)

    def close(self) -> None:
        self.pool.close()
        self._rewards.close()


class Rollouts:
    """Prompts in their order, answered by the engines at the policy's newest weights."""

    def __init__(self, config: Config, engines: Engines, prompts: PromptSet) -> None:
        self._config, self._engines, self._prompts = config, engines, prompts
        self.order = prompt_order(config, prompts)

    def collect(self, step: int, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        rollout, num_prompts = self._config.rollout, self._config.data.prompts_per_step

        num_drawn = 0

        def draw(count: int) -> list[Sample]:
            nonlocal num_drawn
            num_drawn += count
            prompts = [self._prompts.prompts[index] for index in self.order.next(count)]
            return self._engines.sample(prompts, rollout.n, rollout.temperature, metrics, timer)

        if rollout.dynamic_sampling is None:
            samples = draw(num_prompts)
        else:
            samples = sample_groups_with_signal(draw, num_prompts, rollout.dynamic_sampling, metrics)
        if "greedy_reward" in ADVANTAGES[self._config.algorithm.advantage].required:
            samples = self._with_greedy_rewards(samples, metrics, timer)
        if rollout.save:
            save_rollouts(self._config.trainer.output_dir / "rollouts", step, samples, num_drawn=num_drawn)
        return samples

    def _with_greedy_rewards(self, samples: list[Sample], metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        """The samples with the reward of one greedy response to each prompt, which is not trained on."""
        prompts = {sample.group: sample.prompt for sample in samples}
        greedy = dict(zip(prompts, self._engines.sample(list(prompts.values()), 1, 0.0, metrics, timer), strict=True))
        metrics.mean("rewards/greedy", sum(answer.reward for answer in greedy.values()), len(greedy))
        return [replace(sample, greedy_reward=greedy[sample.group].reward) for sample in samples]


class Recording:
    """The samples that an earlier run saved with `rollout.save`. The prompts' order moves as it did there."""

    def __init__(self, config: Config, prompts: PromptSet) -> None:
        self._config = config
        self.order = prompt_order(config, prompts)

    def collect(self, step: int, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        directory = self._config.rollout.replay_dir
        assert directory is not None
        with timer.phase("rollout"):
            samples = recorded_samples(self._config, step)
            self.order.next(num_prompts_drawn(directory, step) or self._config.data.prompts_per_step)
        return samples


def recorded_samples(config: Config, step: int) -> list[Sample]:
    """The samples of `rollout.replay_dir`, with their routed experts only if `rollout.router_replay` is set.

    Raises:
        UserError: it is set and a sample has none, or what `load_rollouts` raises.
    """
    directory = config.rollout.replay_dir
    assert directory is not None
    samples = load_rollouts(directory, step)
    if not config.rollout.router_replay:
        return [replace(sample, response=replace(sample.response, routed_experts=None)) for sample in samples]
    if missing := sum(sample.response.routed_experts is None for sample in samples):
        raise UserError(
            f"rollout.router_replay=true, but {missing} of {len(samples)} samples of step {step} in {directory} were recorded without it; "
            "set it to false or record the samples again"
        )
    return samples


class Demonstrations:
    """Known good answers, for supervised fine-tuning."""

    def __init__(self, config: Config, prompts: PromptSet) -> None:
        self._config, self._prompts = config, prompts
        self._tokenizer = load_tokenizer(config)
        self.order = prompt_order(config, prompts)

    def collect(self, step: int, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        with timer.phase("data"):
            samples = []
            for group, index in enumerate(self.order.next(self._config.data.prompts_per_step)):
                samples.append(demonstration_sample(self._tokenizer, self._prompts.prompts[index], group))
            return samples


def demonstration_sample(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, group: int) -> Sample:
    """The prompt's known good answer as a sample, without log-probs and reward."""
    response = Response(demonstration_tokens(tokenizer, prompt), (), prompt.demonstration or "", "stop", policy_version=0)
    return Sample(prompt, response, group=group, reward=0.0)


def check_samples(samples: list[Sample]) -> None:
    """Refuses numbers that would make every weight of the model NaN, wherever the samples come from.

    Raises:
        UserError: all samples with a reward or a log-prob that is not finite, each with its prompt.
    """
    faults = []
    for place, sample in enumerate(samples):
        where = f"sample {place} (prompt {sample.prompt.id} of {sample.prompt.data_source})"
        if not math.isfinite(sample.reward):
            faults.append(f"{where} has the reward {sample.reward}: the reward function must return a finite number")
        if sample.greedy_reward is not None and not math.isfinite(sample.greedy_reward):
            faults.append(f"{where} has the greedy reward {sample.greedy_reward}: the reward function must return a finite number")
        if not all(map(math.isfinite, sample.response.log_probs)):
            faults.append(f"{where} has log-probs that are not finite: the engine or the recording is broken")
    if faults:
        raise UserError("\n".join(faults))


class Evaluation:
    """Greedy answers to held-out prompts."""

    def __init__(self, engines: Engines, prompts: PromptSet) -> None:
        self._engines, self._prompts = engines, prompts.prompts

    def accuracy(self) -> dict[str, float]:
        """eval/accuracy, the mean reward, and what goes with it."""
        samples = self._engines.sample(self._prompts, 1, 0.0, Metrics(), PhaseTimer())
        return {
            "eval/accuracy": sum(sample.reward for sample in samples) / len(samples),
            "eval/response_length": sum(len(sample.response.token_ids) for sample in samples) / len(samples),
            "eval/num_prompts": float(len(samples)),
        }


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(config.model.path)


def read_prompts(config: Config, source: SourceConfig) -> PromptSet:
    """The prompts of `source`.

    Warns:
        UserWarning: some were longer than `data.max_prompt_tokens` and left out.
    """
    prompts = load_prompts(source, load_tokenizer(config), max_prompt_tokens=config.data.max_prompt_tokens, overlong=config.data.overlong_prompts)
    if prompts.num_filtered:
        origin = source.path or source.reasoning_gym
        total = prompts.num_filtered + len(prompts.prompts)
        warnings.warn(f"{prompts.num_filtered} of {total} prompts of {origin} exceed data.max_prompt_tokens and were left out", UserWarning, stacklevel=2)
    return prompts


def prompt_order(config: Config, prompts: PromptSet) -> PromptOrder:
    return PromptOrder(len(prompts.prompts), shuffle=config.data.shuffle, seed=config.data.seed)
