"""DAPO's dynamic sampling: draw until enough prompts have responses to compare."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import torch

from otb_megatron.algorithms import groups_with_signal
from otb_megatron.config import DynamicSamplingConfig
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.types import Sample, UserError


def sample_groups_with_signal(draw: Callable[[int], list[Sample]], num_groups: int, settings: DynamicSamplingConfig, metrics: Metrics) -> list[Sample]:
    """The samples of `num_groups` groups whose rewards differ (arXiv 2503.14476, section 3.2), numbered from 0 in the order they were drawn.

    It looks at the verifier's rewards, before anything of the length or the KL is taken off them. Every drawn response is trained on
    or counted: `sampling/groups_without_signal`, and `sampling/groups_surplus` where `oversampling` found more than was missing.

    Args:
        draw: samples that many prompts, the next ones in order; a prompt's samples share a group.
        num_groups: of a full step.

    Raises:
        UserError: not one such group was found in `max_rounds` rounds.

    Warns:
        UserWarning: fewer than `num_groups` were found; the step is smaller.
    """
    found: list[list[Sample]] = []
    drawn: list[Sample] = []
    num_drawn, num_rounds = 0, 0
    while len(found) < num_groups and num_rounds < settings.max_rounds:
        num_rounds += 1
        samples = draw(math.ceil((num_groups - len(found)) * settings.oversampling))
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        signal = groups_with_signal(torch.tensor([s.reward for s in samples], dtype=torch.float64), torch.tensor([s.group for s in samples]))
        with_signal = {sample.group for sample, kept in zip(samples, signal.tolist(), strict=True) if kept}
        found += [members for group, members in groups.items() if group in with_signal]
        num_drawn += len(groups)
        drawn += samples
    kept = found[:num_groups]
    metrics.mean("sampling/rounds", num_rounds, 1)
    metrics.sum("sampling/groups", num_drawn)
    metrics.sum("sampling/groups_without_signal", num_drawn - len(found))
    metrics.sum("sampling/groups_surplus", len(found) - len(kept))
    metrics.sum("sampling/groups_missing", num_groups - len(kept))
    metrics.sum("sampling/tokens", sum(len(sample.response.token_ids) for sample in drawn))
    metrics.mean("sampling/reward", sum(sample.reward for sample in drawn), len(drawn))
    if not kept:
        rewards = sorted({sample.reward for sample in drawn})
        raise UserError(
            f"rollout.dynamic_sampling: no prompt of {num_drawn} in {num_rounds} round(s) has responses with different rewards (all rewards lie between "
            f"{rewards[0]:g} and {rewards[-1]:g}); look at rewards.function, choose prompts of another difficulty, raise rollout.n, or raise "
            "rollout.dynamic_sampling.max_rounds"
        )
    if len(kept) < num_groups:
        warnings.warn(
            f"rollout.dynamic_sampling: {len(kept)} of {num_groups} prompts with signal after {num_rounds} rounds; the step is smaller",
            UserWarning,
            stacklevel=2,
        )
    return [replace(sample, group=number) for number, members in enumerate(kept) for sample in members]
