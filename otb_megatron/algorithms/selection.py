"""Which samples a step learns from, and rewards that depend on length: DAPO and SimpleTIR."""

from __future__ import annotations

import torch
from torch import Tensor


def groups_with_signal(outcome: Tensor, group: Tensor, *, tolerance: float = 1e-6) -> Tensor:
    """DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): the samples of groups whose outcomes are not all the same.

    Outcomes that differ by no more than `tolerance` times the largest of the group (float32 rounding) are the same. A group of
    one has no signal. Groups that fail are to be replaced by others until the step is full.

    Example: outcomes (1, 0) and (1, 1): True, True, False, False.

    Args:
        outcome: [samples], the sum of each sample's rewards.
        group: [samples], ids.

    Returns:
        bool [samples].
    """
    ids, index = torch.unique(group, return_inverse=True)
    zeros = outcome.new_zeros(ids.numel())
    highest = zeros.scatter_reduce(0, index, outcome, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, index, outcome, "amin", include_self=False)
    largest = torch.maximum(highest.abs(), lowest.abs())
    return (highest - lowest > tolerance * largest)[index]


def soft_overlong_punishment(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), to be added to the outcome reward.

        0                                                up to max_tokens - buffer_tokens
        (max_tokens - buffer_tokens - length) / buffer_tokens    up to max_tokens
        -1                                               beyond

    Example: max 100, buffer 20: lengths 80, 90, 100, 120 give 0, -0.5, -1, -1.

    Args:
        lengths: [samples], response tokens.
        max_tokens: the length at which the punishment is full, usually rollout.max_response_tokens.
        buffer_tokens: where it starts, below that.

    Returns:
        float32 [samples].
    """
    return ((max_tokens - buffer_tokens - lengths.float()) / buffer_tokens).clamp(-1.0, 0.0)


def without_void_turns(is_void: Tensor, turn_offsets: Tensor) -> Tensor:
    """SimpleTIR (arXiv 2509.02479): the trajectories in which no turn is void.

    A turn is void that neither calls a tool nor answers; it marks a response that has left the distribution, and its whole
    trajectory is removed.

    Example: turns (ok, void) and (ok): False, True.

    Args:
        is_void: bool [turns], the trajectories one after the other.
        turn_offsets: [samples + 1], where each trajectory's turns start.

    Returns:
        bool [samples]; a trajectory without turns is kept.
    """
    lengths = turn_offsets.diff()
    sample = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    return torch.zeros_like(lengths).index_add_(0, sample, is_void.long()) == 0
