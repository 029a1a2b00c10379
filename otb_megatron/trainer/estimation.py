"""From statistics and rewards to the inputs of the loss. Runs on the driver, for the whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from otb_megatron.algorithms import (
    CORRECTIONS,
    LOSSES,
    AdvantageInputs,
    Corrected,
    action_weights,
    energy,
    estimate,
    explained_variance,
    own_options,
    positive_example_weights,
    sums,
    value_targets,
    whiten,
)
from otb_megatron.config import Config
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.batch import Batch, Part
from otb_megatron.trainer.observation import record_advantages, record_mismatch, record_policy
from otb_megatron.trainer.reward_shaping import RewardShaping
from otb_megatron.types import LossInputs, PolicyStatistics, Trajectories, UserError


def loss_inputs(
    batch: Batch,
    policy: PolicyStatistics,
    reference_log_prob: Tensor | None,
    values: Tensor | None,
    config: Config,
    shaping: RewardShaping,
    step: int,
    metrics: Metrics,
) -> LossInputs:
    """Advantages, correction weights, aggregation weights and what else the loss needs of every action; the critic's targets where there is one.

    Args:
        policy: [actions] under the weights that sampled them.
        reference_log_prob: [actions], or None where no KL is configured.
        values: [actions], or None where there is no critic.

    Raises:
        UserError: the estimator lacks a field, a number is unusable, or the correction rejected everything.
    """
    trajectories, algorithm = batch.trajectories, config.algorithm
    assert trajectories is not None
    corrected = _correct(trajectories, policy.log_prob, config)
    action_energy = energy(policy)
    record_mismatch(trajectories, policy.log_prob, corrected, metrics)
    record_policy(trajectories, policy, action_energy, config.rollout.max_response_tokens, metrics)
    inputs = AdvantageInputs(
        shaping.apply(trajectories, policy.log_prob, reference_log_prob, metrics),
        trajectories.action_offsets,
        trajectories.group,
        energy=action_energy,
        correction=corrected.weight,
        values=values,
        greedy_reward=trajectories.greedy_reward,
    )
    advantages = estimate(algorithm.advantage, inputs, algorithm.advantage_options)
    if algorithm.whiten_advantages:
        advantages = whiten(advantages.double()).float()
    record_advantages(advantages, action_energy, trajectories.action_offsets, corrected.weight, metrics)
    return LossInputs(
        old_log_prob=policy.log_prob,
        advantages=advantages,
        weight=aggregation_weights(batch.parts, trajectories.num_actions, config).masked_fill(corrected.rejected, 0.0),
        correction=corrected.weight,
        reference_log_prob=reference_log_prob if algorithm.kl_coef else None,
        old_values=values,
        returns=None if values is None else _returns(inputs, values, config, metrics),
        selected=_selected(batch.parts, policy.log_prob, advantages, config, step),
        positive=_positive(batch.parts, trajectories, config),
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


def _correct(trajectories: Trajectories, log_prob: Tensor, config: Config) -> Corrected:
    algorithm = config.algorithm
    corrected = CORRECTIONS[algorithm.rollout_correction](
        log_prob, trajectories.rollout_log_prob, trajectories.action_offsets, **algorithm.rollout_correction_options
    )
    if trajectories.num_actions and bool(corrected.rejected.all()):
        difference = float((log_prob - trajectories.rollout_log_prob).abs().mean())
        raise UserError(
            f"algorithm.rollout_correction={algorithm.rollout_correction!r} rejects all {trajectories.num_actions} actions of the step, whose log-probs "
            f"in trainer and engine differ by {difference:.3g} on average: widen its bounds (algorithm.rollout_correction_options) or find out why"
        )
    return corrected


def _selected(parts: list[Part], log_prob: Tensor, advantages: Tensor, config: Config, step: int) -> Tensor | None:
    """bool [actions]: the tokens that the loss acts on, chosen among those of each optimizer step; None for losses that choose none."""
    selection = LOSSES[config.algorithm.loss].selection
    if selection is None:
        return None
    options = own_options(selection, config.algorithm.loss_options)
    selected = torch.zeros_like(log_prob, dtype=torch.bool)
    for number, part in enumerate(parts):
        # From the step's number, so that a resumed run draws what an uninterrupted one does.
        seed = np.random.SeedSequence([config.trainer.seed % 2**64, step, number]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(seed >> np.uint64(1)))
        selected[part.actions] = selection(log_prob[part.actions], advantages[part.actions], generator, **options)
    return selected


def _positive(parts: list[Part], trajectories: Trajectories, config: Config) -> Tensor | None:
    """[actions]: the weight of positive examples, those whose verifier's reward is above 0; None for losses without it."""
    if "positive" not in LOSSES[config.algorithm.loss].required:
        return None
    right = sums(trajectories.rewards, trajectories.action_offsets) > 0
    weights = torch.zeros(trajectories.num_actions)
    for part in parts:
        weights[part.actions] = positive_example_weights(right[part.samples], part.offsets)
    return weights
