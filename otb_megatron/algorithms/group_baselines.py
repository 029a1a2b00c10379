"""Advantages that are one number per response: its return against a baseline of its prompt group.

Every function takes

    rewards: [actions], each at the action that it was paid for;
    offsets: [samples + 1], where each sample starts in the [actions] arrays;
    group: [samples], any integer ids; members may be interleaved, groups may differ in size;

and returns [actions] in the dtype of `rewards`, computed in float64. R^i is the sum of response i's rewards, means and sums
run over its group. A group of one response has no baseline: advantage = return, as in verl. A group whose returns differ by
float32 rounding only gets advantages of exactly 0.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from otb_megatron.algorithms.options import NonNegative
from otb_megatron.algorithms.ragged import Groups, sample_of_action, sums, whiten

_CONSTANT = 1e-6  # spread relative to the largest return of the group, a few float32 roundings


def grpo(rewards: Tensor, offsets: Tensor, group: Tensor, *, normalize_by_std: bool = True, epsilon: NonNegative = 1e-6) -> Tensor:
    """Group-relative advantages: GRPO (arXiv 2402.03300, section 4.1.2), and Dr.GRPO (arXiv 2503.20783) without the division.

        A^i = (R^i - mean R) / (std R + epsilon)

    The standard deviation is the sample one (N - 1), as in verl; the paper does not say which.

    Example: returns 1, 0, 0, 1 have mean 0.5 and standard deviation 0.57735: advantages +-0.86602, +-0.5 without the division.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    centred = _minus(outcome, groups.mean(outcome), groups)
    if normalize_by_std:
        centred = centred / _scale(centred, groups, epsilon)
    return _to_actions(centred, rewards, offsets)


def rloo(rewards: Tensor, offsets: Tensor, group: Tensor) -> Tensor:
    """REINFORCE leave-one-out (arXiv 2402.14740).

        A^i = R^i - mean of the others' R = (R^i - mean R) N / (N - 1)

    Example: returns 1, 0, 0, 1 give 1 - 1/3 = 2/3 and 0 - 2/3 = -2/3.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    size = groups.size[groups.index]
    scale = torch.where(size > 1, size / (size - 1).clamp(min=1).double(), 1.0)
    return _to_actions(_minus(outcome, groups.mean(outcome), groups) * scale, rewards, offsets)


def opo(rewards: Tensor, offsets: Tensor, group: Tensor) -> Tensor:
    """On-policy RL with optimal baseline (arXiv 2505.23585): the baseline weighted by length l, a proxy of the squared score norm.

        A^i = R^i - sum_k l^k R^k / sum_k l^k

    Example: lengths 1 and 3 with returns 1 and 0 have the baseline 1/4: advantages 0.75 and -0.25.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    length = offsets.diff().double()
    baseline = groups.total(length * outcome) / groups.total(length).clamp(min=1)
    return _to_actions(_minus(outcome, baseline, groups), rewards, offsets)


def optimal_global_baseline(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None = None, *, energy_floor: NonNegative = 1e-10
) -> Tensor:
    """The optimal baseline of whole trajectories, one per prompt (Weaver and Tao 2001; the OGB of arXiv 2602.07078).

        A^i = R^i - sum_k R^k W^k / sum_k W^k          W^k = sum_t rho_t^2 w_t of response k

    As in `optimal_token_baseline`, a mean W below `energy_floor` times the mean length is lifted to it, so that the baseline
    becomes the plain mean continuously as the energies vanish.

    Example: energies (1.0, 0.5) and (0.5,) with returns 0 and 1 have the baseline 0.5 / 2 = 0.25: advantages -0.25 and 0.75.

    Args:
        energy: [actions], w.
        correction: [actions], rho, the clipped train/rollout ratio; None for 1.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    weight = sums(energy.double() if correction is None else energy.double() * correction.double().square(), offsets)
    lift = (energy_floor * groups.mean(offsets.diff().double()) - groups.mean(weight)).clamp(min=0.0)
    weight = weight + lift[groups.index]
    total = groups.total(weight)
    baseline = torch.where(total > 0, groups.total(weight * outcome) / total, groups.mean(outcome))
    return _to_actions(_minus(outcome, baseline, groups), rewards, offsets)


def gpg(rewards: Tensor, offsets: Tensor, group: Tensor, *, norm: Annotated[float, Field(gt=0)] = 1.0) -> Tensor:
    """Group policy gradient (arXiv 2504.02546): GRPO without the standard deviation, rescaled for groups without signal.

        A^i = alpha (R^i - mean R) / norm         alpha = samples / samples in groups whose returns differ

    alpha makes up for the samples whose advantage is zero. verl's alpha divides by the number of samples with a return other
    than 0 instead, which scales the step with the failure rate; this is the paper's.

    Example: returns (1, 0) and (1, 1): alpha = 4 / 2 = 2, advantages 1, -1, 0, 0.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    centred = _minus(outcome, groups.mean(outcome), groups)
    with_signal = (groups.maximum(centred.abs()) > 0)[groups.index] & groups.member
    alpha = groups.member.sum() / with_signal.sum().clamp(min=1).double()
    return _to_actions(alpha * centred / norm, rewards, offsets)


def grpo_passk(rewards: Tensor, offsets: Tensor, group: Tensor, *, normalize_by_std: bool = True, epsilon: NonNegative = 1e-6) -> Tensor:
    """Pass@k policy gradient (arXiv 2503.19595): only the best response of a group learns, by its lead over the second best.

        A^best = (R^best - R^second) / (std R + epsilon), 0 for the others

    Where several are best there is no lead, and all get 0. The division is verl's.

    Example: returns 3, 1, 2: the first gets 3 - 2 = 1, divided by the standard deviation 1.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    centred = _minus(outcome, groups.mean(outcome), groups)
    best, second = _two_best(centred, groups)
    lead = torch.where(centred == best[groups.index], (best - second)[groups.index], 0.0)
    if normalize_by_std:
        lead = lead / _scale(centred, groups, epsilon)
    return _to_actions(torch.where(groups.has_peers(), lead, outcome), rewards, offsets)


def remax(rewards: Tensor, offsets: Tensor, greedy_reward: Tensor) -> Tensor:
    """ReMax (arXiv 2310.10505): the baseline is the reward of the greedy response to the same prompt.

        A^i = R^i - R_greedy

    Example: returns 1 and 0 where the greedy response earned 1: advantages 0 and -1.

    Args:
        greedy_reward: [samples], that of the sample's prompt.
    """
    return _to_actions(sums(rewards.double(), offsets) - greedy_reward.double(), rewards, offsets)


def reinforce_plus_plus_baseline(rewards: Tensor, offsets: Tensor, group: Tensor) -> Tensor:
    """REINFORCE++ with a group baseline (arXiv 2501.03262): centred in the group, scaled over the batch.

        A^i = whiten(R^i - mean R), mean and variance over all actions of the batch

    Example: returns 1 and 0 of one group, one action each: +-0.5 centred, variance 0.5: +-0.70711.
    """
    outcome, groups = sums(rewards.double(), offsets), Groups.of(group, offsets)
    centred = _minus(outcome, groups.mean(outcome), groups)
    return whiten(centred[sample_of_action(offsets)]).to(rewards.dtype)


def _minus(outcome: Tensor, baseline: Tensor, groups: Groups) -> Tensor:
    """[samples]: outcome minus its group's baseline [groups], exactly 0 where the outcomes of a group are all equal but for rounding."""
    spread = groups.maximum((outcome - groups.mean(outcome)[groups.index]).abs())
    constant = (spread <= _CONSTANT * groups.maximum(outcome.abs()))[groups.index]
    return torch.where(groups.has_peers(), (outcome - baseline[groups.index]).masked_fill(constant, 0.0), outcome)


def _scale(centred: Tensor, groups: Groups, epsilon: float) -> Tensor:
    """[samples]: the sample standard deviation of the group plus epsilon; 1 for a group of one and for a constant group."""
    variance = groups.total(centred.square()) / (groups.size - 1).clamp(min=1)
    return torch.where((groups.size > 1) & (variance > 0), variance.sqrt() + epsilon, 1.0)[groups.index]


def _two_best(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """[groups]: the greatest and the second greatest value of each group's members; equal where there are several greatest."""
    values = values.masked_fill(~groups.member, -torch.inf)
    lowest = values.new_full((groups.size.numel(),), -torch.inf)
    best = lowest.scatter_reduce(0, groups.index, values, "amax")
    is_best = values == best[groups.index]
    several = torch.zeros_like(groups.size).index_add_(0, groups.index, is_best.long()) > 1
    second = lowest.scatter_reduce(0, groups.index, values.masked_fill(is_best, -torch.inf), "amax")
    return best, torch.where(several, best, second)


def _to_actions(per_sample: Tensor, rewards: Tensor, offsets: Tensor) -> Tensor:
    return per_sample[sample_of_action(offsets)].to(rewards.dtype)
