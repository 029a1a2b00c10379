"""From statistics and rewards to the inputs of the loss. Runs on the driver, for the whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor

from otb_megatron.algorithms import (
    AdvantageInputs,
    action_weights,
    energy,
    estimate,
    explained_variance,
    truncated_importance_weights,
    value_targets,
)
from otb_megatron.config import Config
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch, Part
from otb_megatron.types import LossInputs, PolicyStatistics, Sample, Trajectories


def loss_inputs(
    batch: Batch, policy: PolicyStatistics, reference_log_prob: Tensor | None, values: Tensor | None, config: Config, metrics: Metrics
) -> LossInputs:
    """Advantages, correction weights and aggregation weights of every action; the critic's targets where there is one.

    Args:
        policy: [actions] under the weights that sampled them.
        reference_log_prob: [actions], or None where no KL is configured.
        values: [actions], or None where there is no critic.
    """
    trajectories, algorithm = batch.trajectories, config.algorithm
    assert trajectories is not None
    correction = None
    if algorithm.rollout_correction == "truncated":
        correction = truncated_importance_weights(policy.log_prob, trajectories.rollout_log_prob, algorithm.rollout_correction_clip)
    action_energy = energy(policy)
    inputs = AdvantageInputs(trajectories.rewards, trajectories.action_offsets, trajectories.group, energy=action_energy, correction=correction, values=values)
    advantages = estimate(algorithm.advantage, inputs, algorithm.advantage_options)
    count = trajectories.num_actions
    for name, column in (("policy/entropy", policy.entropy), ("policy/log_prob", policy.log_prob), ("policy/energy", action_energy)):
        metrics.mean(name, float(column.sum(dtype=torch.float64)), count)
    metrics.mean("advantages/mean", float(advantages.sum(dtype=torch.float64)), count)
    metrics.mean("advantages/std", float(advantages.std(correction=0)) * count, count)
    difference = (policy.log_prob - trajectories.rollout_log_prob).abs()
    metrics.mean("rollout/log_prob_difference", float(difference.sum(dtype=torch.float64)), count)
    return LossInputs(
        old_log_prob=policy.log_prob,
        advantages=advantages,
        weight=aggregation_weights(batch.parts, count, config),
        correction=correction,
        reference_log_prob=reference_log_prob,
        old_values=values,
        returns=None if values is None else _returns(inputs, values, config, metrics),
    )


def _returns(inputs: AdvantageInputs, values: Tensor, config: Config, metrics: Metrics) -> Tensor:
    """[actions] what the critic learns, and how well it knows it before it learns from this step."""
    discount = config.algorithm.advantage_options.get("discount", 1.0)  # the default of every estimator that uses values
    returns = value_targets(inputs.rewards, inputs.offsets, values, discount=discount, lam=config.critic.lam)
    for name, column in (("critic/values", values), ("critic/returns", returns)):
        metrics.mean(name, float(column.sum(dtype=torch.float64)), column.numel())
    metrics.mean("critic/explained_variance", explained_variance(values, returns), 1)
    return returns


def demonstration_inputs(batch: Batch, config: Config) -> LossInputs:
    """Loss inputs of supervised fine-tuning, which knows neither old policy nor advantage."""
    assert batch.trajectories is not None
    nothing = torch.zeros(batch.trajectories.num_actions)
    return LossInputs(old_log_prob=nothing, advantages=nothing, weight=aggregation_weights(batch.parts, nothing.numel(), config))


def aggregation_weights(parts: list[Part], num_actions: int, config: Config) -> Tensor:
    """[actions] weight of each action in the loss of its own optimizer step."""
    weights = torch.zeros(num_actions)
    length = config.algorithm.aggregation_length or config.rollout.max_response_tokens
    for part in parts:
        weights[part.actions] = action_weights(part.offsets, config.algorithm.aggregation, length)
    return weights


def record_samples(samples: list[Sample], trajectories: Trajectories, metrics: Metrics, *, scored: bool) -> None:
    """How the step's samples are."""
    count = len(samples)
    metrics.mean("response/length", sum(len(sample.response.token_ids) for sample in samples), count)
    metrics.mean("response/truncated_fraction", sum(sample.response.finish_reason == "length" for sample in samples), count)
    metrics.sum("rollout/tokens", trajectories.num_actions)
    metrics.sum("data/tokens", trajectories.tokens.numel())
    if scored:
        rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
        metrics.mean("rewards/mean", float(rewards.sum()), count)
        metrics.mean("rewards/std", float(rewards.std(correction=0)) * count, count)
