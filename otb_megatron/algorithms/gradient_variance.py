"""The variance of policy gradient estimators, measured from the inner products of true scores.

An estimator's gradient from a group of N responses to one prompt is

    h = 1/N sum_i sum_t A_t^i s_t^i          s_t = grad log pi(y_t)

With M responses to a prompt, a random partition of them into m = floor(M / N) disjoint groups gives m independent gradients
h_1 .. h_m, and

    variance  1/(m-1) (sum_j |h_j|^2 - |sum_j h_j|^2 / m)       is unbiased for  E|h|^2 - |E h|^2
    signal    1/(m(m-1)) (|sum_j h_j|^2 - sum_j |h_j|^2)        is unbiased for  |E h|^2

given the prompt, because groups share no response; both are averaged over several partitions. Only inner products of scores enter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otb_megatron.algorithms.advantages import AdvantageInputs, estimate


@dataclass(frozen=True)
class GroupMoments:
    """Of an estimator at one group size, given each prompt. All float64 [prompts]; all but `variance` may come out below 0 by chance."""

    variance: Tensor  # E|h|^2 - |E h|^2
    signal: Tensor  # |E h|^2
    inner: Tensor  # <E h, E u>, u the unbiased estimator's gradient from the same groups
    unbiased_signal: Tensor  # |E u|^2
    bias: Tensor  # |E h - E u|^2


def draw_partitions(group: Tensor, group_size: int, num_partitions: int, generator: torch.Generator) -> Tensor:
    """Random partitions of each prompt's responses into disjoint groups; responses that are left over take no part.

    Args:
        group: [samples], the prompt of each response; every prompt has at least 2 group_size.

    Returns:
        int64 [partitions, m, prompts, group_size], indices of samples; m is that of the prompt with the fewest responses. `[p, j]` is a
        batch of one group a prompt.
    """
    members = [(group == prompt).nonzero().flatten() for prompt in group.unique()]
    num_groups = min(len(of_prompt) for of_prompt in members) // group_size
    if num_groups < 2:
        raise ValueError(f"groups of {group_size} need {2 * group_size} responses to every prompt; one has {min(len(m) for m in members)}")

    def partition(of_prompt: Tensor) -> Tensor:
        return of_prompt[torch.randperm(len(of_prompt), generator=generator)[: num_groups * group_size]].view(num_groups, group_size)

    return torch.stack([torch.stack([partition(of_prompt) for of_prompt in members], 1) for _ in range(num_partitions)])


def coefficients(name: str, inputs: AdvantageInputs, partitions: Tensor, options: Mapping[str, Any]) -> Tensor:
    """A_t^i / N of every action in every batch, 0 where its response is in none of the batch's groups.

    The estimator sees one batch at a time, as in training: some scale by the whole batch.

    Args:
        name: of ADVANTAGES.
        inputs: all responses to all prompts.
        partitions: [partitions, m, prompts, group_size], of `draw_partitions`.

    Returns:
        float64 [partitions, m, actions].
    """
    num_partitions, num_groups, _, group_size = partitions.shape
    found = torch.zeros(num_partitions * num_groups, inputs.rewards.numel(), dtype=torch.float64)
    for row, samples in zip(found, partitions.flatten(0, 1).flatten(1), strict=True):
        batch, actions = _select(inputs, samples)
        row[actions] = estimate(name, batch, options).double() / group_size
    return found.view(num_partitions, num_groups, -1)


def group_moments(of_estimator: Tensor, unbiased: Tensor, grams: Sequence[Tensor]) -> GroupMoments:
    """
    Args:
        of_estimator: [partitions, m, actions], its `coefficients`.
        unbiased: those of an unbiased estimator, for the same partitions.
        grams: for each prompt float64 [its actions, its actions], inner products of their scores; prompts in the order of the actions.
    """
    sizes = [len(gram) for gram in grams]
    found = []
    for own, reference, gram in zip(of_estimator.split(sizes, -1), unbiased.split(sizes, -1), grams, strict=True):
        difference = own - reference
        projected, projected_reference = own @ gram, reference @ gram
        signal = _between_groups(projected, own)
        found.append(
            (
                (projected * own).sum(-1).mean() - signal,
                signal,
                _between_groups(projected, reference),
                _between_groups(projected_reference, reference),
                _between_groups(projected - projected_reference, difference),
            )
        )
    return GroupMoments(*(torch.stack(column) for column in zip(*found, strict=True)))


def _between_groups(projected: Tensor, other: Tensor) -> Tensor:
    """The mean of <h_i, k_j> over partitions and pairs of different groups i and j: unbiased for <E h, E k>.

    Args:
        projected: [partitions, m, actions], coefficients of h times the Gram matrix.
        other: [partitions, m, actions], coefficients of k.
    """
    num_groups = other.size(1)
    same = (projected * other).sum((1, 2))
    all_pairs = (projected.sum(1) * other.sum(1)).sum(1)
    return ((all_pairs - same) / (num_groups * (num_groups - 1))).mean()


def _select(inputs: AdvantageInputs, samples: Tensor) -> tuple[AdvantageInputs, Tensor]:
    """The batch of these samples, and where its actions stand in `inputs`."""
    lengths = inputs.offsets.diff()[samples]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    actions = torch.arange(int(offsets[-1])) + torch.repeat_interleave(inputs.offsets[:-1][samples] - offsets[:-1], lengths)
    energy = None if inputs.energy is None else inputs.energy[actions]
    return AdvantageInputs(inputs.rewards[actions], offsets, inputs.group[samples], energy=energy), actions
