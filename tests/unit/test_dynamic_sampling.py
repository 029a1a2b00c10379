"""Dynamic sampling: groups without signal are replaced by the next prompts, everything drawn is trained on or counted, and a resume repeats nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from otb_megatron.config import Config, DynamicSamplingConfig, validate
from otb_megatron.data.sources import PromptSet
from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.telemetry.timing import PhaseTimer
from otb_megatron.trainer.dynamic_sampling import sample_groups_with_signal
from otb_megatron.trainer.source import Recording, Rollouts
from otb_megatron.types import Prompt, Response, Sample, UserError


class Engines:
    """Answers prompt i with rewards (1, 0) where i is a multiple of `every`, else with twice the same; greedy answers earn i."""

    def __init__(self, every: int = 3) -> None:
        self.every = every
        self.asked: list[int] = []
        self.rounds: list[int] = []

    def sample(self, prompts: list[Prompt], n: int, temperature: float, metrics: Metrics, timer: PhaseTimer) -> list[Sample]:
        if temperature == 0.0:
            return [_sample(prompt, group, float(prompt.id)) for group, prompt in enumerate(prompts)]
        self.asked += [prompt.id for prompt in prompts]
        self.rounds.append(len(prompts))
        rewards = [(1.0, 0.0) if prompt.id % self.every == 0 else (float(prompt.id % 2),) * 2 for prompt in prompts]
        return [_sample(prompt, group, reward) for group, prompt in enumerate(prompts) for reward in rewards[group]]


def _sample(prompt: Prompt, group: int, reward: float) -> Sample:
    return Sample(prompt, Response((5, 6), (-1.0, -1.0), "", "stop", 0), group, reward)


PROMPTS = PromptSet([Prompt(number, "test", (), (4,), "") for number in range(30)], num_filtered=0)


def _config(tmp_path: Path, advantage: str = "rloo", **rollout: Any) -> Config:
    values = {
        "model": {"path": str(tmp_path)},
        "data": {"train": {"path": "unused"}, "prompts_per_step": 4, "shuffle": False},
        "rollout": {"n": 2, "save": True} | rollout,
        "algorithm": {"advantage": advantage},
        "trainer": {"output_dir": str(tmp_path / "run")},
    }
    return validate(values, "test")


def _rollouts(tmp_path: Path, engines: Engines, *, advantage: str = "rloo", **dynamic_sampling: Any) -> Rollouts:
    return Rollouts(_config(tmp_path, advantage, dynamic_sampling=dynamic_sampling), engines, PROMPTS)  # type: ignore[arg-type]


def test_groups_without_signal_are_replaced(tmp_path: Path) -> None:
    """Wanted 4 of the multiples of 3: prompts 0-3 give 0 and 3, then 4-5 none, 6-7 give 6, 8 none, 9: five rounds, 10 prompts, 6 without signal.

    Of those, 1, 5 and 7 earned (1, 1) and 2, 4 and 8 (0, 0): with four groups of one right answer each, 10 of 20 responses.
    """
    engines, metrics = Engines(), Metrics()
    rollouts = _rollouts(tmp_path, engines)
    samples = rollouts.collect(1, metrics, PhaseTimer())
    assert [(sample.prompt.id, sample.group, sample.reward) for sample in samples] == [
        (number, group, reward) for group, number in enumerate((0, 3, 6, 9)) for reward in (1.0, 0.0)
    ]
    assert engines.rounds == [4, 2, 2, 1, 1] and engines.asked == list(range(10))
    assert metrics.values() == {
        "sampling/rounds": 5,
        "sampling/groups": 10,
        "sampling/groups_without_signal": 6,
        "sampling/groups_surplus": 0,
        "sampling/groups_missing": 0,
        "sampling/tokens": 40,
        "sampling/reward": 0.5,
    }
    assert load_rollouts(tmp_path / "run" / "rollouts", 1) == samples


def test_oversampling_saves_rounds_and_counts_what_it_drops(tmp_path: Path) -> None:
    """Twice the missing: 8 prompts give 0, 3, 6; then 2 prompts (8, 9) give 9. Four times: 16 prompts give 0, 3, ..., 15, two more than wanted."""
    for factor, rounds, surplus in ((2.0, [8, 2], 0), (4.0, [16], 2)):
        engines, metrics = Engines(), Metrics()
        samples = _rollouts(tmp_path, engines, oversampling=factor).collect(1, metrics, PhaseTimer())
        assert engines.rounds == rounds and [sample.prompt.id for sample in samples[::2]] == [0, 3, 6, 9]
        assert metrics.values()["sampling/groups_surplus"] == surplus


def test_a_resume_draws_each_prompt_once(tmp_path: Path) -> None:
    """Three steps in a row against two runs of which the second starts from the first one's state."""
    whole, parts = Engines(), Engines()
    one = _rollouts(tmp_path, whole)
    for step in (1, 2, 3):
        one.collect(step, Metrics(), PhaseTimer())
    first = _rollouts(tmp_path, parts)
    first.collect(1, Metrics(), PhaseTimer())
    second = _rollouts(tmp_path, parts)
    second.order.load_state_dict(first.order.state_dict())
    for step in (2, 3):
        second.collect(step, Metrics(), PhaseTimer())
    assert whole.asked == parts.asked
    assert sorted(whole.asked[:30]) == list(range(30))  # an epoch holds each prompt once
    assert one.order.state_dict() == second.order.state_dict()


def test_at_the_bound_the_step_is_smaller_and_says_so(tmp_path: Path) -> None:
    metrics = Metrics()
    with pytest.warns(UserWarning, match="3 of 4 prompts with signal after 3 rounds; the step is smaller"):
        samples = _rollouts(tmp_path, Engines(), max_rounds=3).collect(1, metrics, PhaseTimer())
    assert [sample.prompt.id for sample in samples[::2]] == [0, 3, 6] and metrics.values()["sampling/groups_missing"] == 1


def test_nothing_to_learn_ends_the_run(tmp_path: Path) -> None:
    """Prompts 1, 5, 7, 11, ...: no group has two rewards."""
    engines = Engines(every=31)
    rollouts = _rollouts(tmp_path, engines, max_rounds=2)
    rollouts.order.next(1)
    with pytest.raises(UserError, match=r"no prompt of 8 in 2 round\(s\) has responses with different rewards .*between 0 and 1\); look at rewards.function"):
        rollouts.collect(1, Metrics(), PhaseTimer())


def test_a_full_first_round_is_the_only_one() -> None:
    engines = Engines(every=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = sample_groups_with_signal(
            lambda count: engines.sample(PROMPTS.prompts[:count], 2, 1.0, Metrics(), PhaseTimer()), 4, DynamicSamplingConfig(), Metrics()
        )
    assert len(samples) == 8 and engines.rounds == [4]


def test_remax_asks_for_one_greedy_response_a_prompt(tmp_path: Path) -> None:
    """Of the prompts that are trained on, 0, 3, 6 and 9, and not of those that were replaced; their reward is their number, 4.5 on average."""
    metrics = Metrics()
    samples = _rollouts(tmp_path, Engines(), advantage="remax").collect(1, metrics, PhaseTimer())
    assert [sample.greedy_reward for sample in samples] == [0, 0, 3, 3, 6, 6, 9, 9]
    assert metrics.values()["rewards/greedy"] == 4.5
    assert load_rollouts(tmp_path / "run" / "rollouts", 1) == samples


def test_a_recording_moves_the_order_as_the_run_did(tmp_path: Path) -> None:
    """Step 1 drew the 10 prompts above, step 2 the next 12, from 10 to 21, the fourth multiple of 3 from there on.

    A recording that does not say how many counts for `prompts_per_step`, 4.
    """
    rollouts = _rollouts(tmp_path, Engines())
    directory = tmp_path / "run" / "rollouts"
    recording = Recording(_config(tmp_path, replay_dir=directory), PROMPTS)
    for step, position in ((1, 10), (2, 22)):
        samples = rollouts.collect(step, Metrics(), PhaseTimer())
        assert recording.collect(step, Metrics(), PhaseTimer()) == samples
        assert recording.order.state_dict() == rollouts.order.state_dict() and recording.order.state_dict()["position"] == position
    save_rollouts(directory, 3, samples)
    recording.collect(3, Metrics(), PhaseTimer())
    assert recording.order.state_dict()["position"] == 26
