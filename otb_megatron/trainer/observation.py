"""What a step says about itself in the metrics, but for its losses. For the driver only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otb_megatron.algorithms import (
    Corrected,
    energy_by_correctness,
    energy_by_position,
    energy_by_probability,
    mismatch,
    sums,
    variance_proxies,
)
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.types import PolicyStatistics, Sample, Trajectories

_PROBABILITY_BOUNDS = (0.5, 0.9, 0.99)
_POSITION_BINS = 4  # over rollout.max_response_tokens


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


def record_mismatch(trajectories: Trajectories, log_prob: Tensor, corrected: Corrected, metrics: Metrics) -> None:
    """How far trainer and engine are apart, and what the correction did about it."""
    count = trajectories.num_actions
    difference = (log_prob - trajectories.rollout_log_prob).abs()
    metrics.mean("rollout/log_prob_difference", float(difference.sum(dtype=torch.float64)), count)
    for name, value in vars(mismatch(log_prob, trajectories.rollout_log_prob, trajectories.action_offsets)).items():
        metrics.mean(f"mismatch/{name}", float(value), 1)
    metrics.mean("mismatch/clipped_fraction", int(corrected.clipped.sum()), count)
    metrics.mean("mismatch/rejected_fraction", int(corrected.rejected.sum()), count)


def record_policy(trajectories: Trajectories, policy: PolicyStatistics, energy: Tensor, max_response_tokens: int, metrics: Metrics) -> None:
    """The policy's own statistics, and which actions the energy is in."""
    offsets, count = trajectories.action_offsets, trajectories.num_actions
    for name, values in (("policy/entropy", policy.entropy), ("policy/log_prob", policy.log_prob), ("policy/energy", energy)):
        metrics.mean(name, float(values.sum(dtype=torch.float64)), count)
    width = math.ceil(max_response_tokens / _POSITION_BINS)
    position = energy_by_position(energy, offsets, width)
    probability = energy_by_probability(energy, policy.log_prob, torch.tensor(_PROBABILITY_BOUNDS))
    correct = energy_by_correctness(energy, offsets, sums(trajectories.rewards, offsets) > 0)
    profiles = {
        tuple(f"position_{bin * width}" for bin in range(position.count.numel())): position,
        tuple(f"probability_{bound:g}" for bound in (0, *_PROBABILITY_BOUNDS)): probability,
        ("incorrect", "correct"): correct,
    }
    for names, profile in profiles.items():
        for name, mean, held in zip(names, profile.mean.tolist(), profile.count.tolist(), strict=True):
            metrics.mean(f"energy/{name}", mean * held if held else 0.0, held)


def record_advantages(advantages: Tensor, energy: Tensor, offsets: Tensor, correction: Tensor | None, metrics: Metrics) -> None:
    """The advantages, and the variance of the gradient as far as they and the energies tell it."""
    count = advantages.numel()
    metrics.mean("advantages/mean", float(advantages.sum(dtype=torch.float64)), count)
    metrics.mean("advantages/std", float(advantages.std(correction=0)) * count, count)
    for name, value in vars(variance_proxies(advantages, energy, offsets, correction)).items():
        metrics.mean(f"variance/{name}", float(value), 1)
