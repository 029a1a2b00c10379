"""Arithmetic on ragged arrays: `[actions]` values of all samples one after the other, cut by `offsets [samples + 1]`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def sample_of_action(offsets: Tensor) -> Tensor:
    """[samples + 1] -> int64 [actions]: the sample that each action belongs to."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=offsets.device), lengths)


def sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[actions], [samples + 1] -> [samples]: the sum over each sample, 0 for a sample without actions."""
    return torch.segment_reduce(values, "sum", offsets=offsets, initial=0.0, unsafe=True)  # unsafe: without a check of the offsets, which costs as much


def discounted_suffix_sums(values: Tensor, offsets: Tensor, discount: float | Tensor) -> Tensor:
    """sum_{k >= 0} discount^k values[t + k] within each sample, for every action t.

    Recursive doubling: after round r each entry holds the first 2^r terms, so the longest sample of length L costs
    log2(L) vectorised rounds on any device, and rounding errors grow with log2(L) only.

    Args:
        values: [actions], floating point.
        offsets: [samples + 1].
        discount: one number, or [samples] of them.

    Returns:
        [actions].
    """
    sample = sample_of_action(offsets)
    factor = discount[sample] if isinstance(discount, Tensor) else discount
    remaining = offsets[1:][sample] - 1 - torch.arange(values.numel(), device=values.device)  # actions of the sample after this one
    longest = int(offsets.diff().max()) if offsets.numel() > 1 else 0
    shift = 1
    while shift < longest:
        later = torch.zeros_like(values)
        later[:-shift] = values[shift:]
        values = values + factor * later.masked_fill(remaining < shift, 0.0)
        shift, factor = 2 * shift, factor * factor
    return values


def prefix_sums(values: Tensor, offsets: Tensor) -> Tensor:
    """[actions], [samples + 1] -> [actions]: sum_{j <= t} values[j] within each sample, by recursive doubling."""
    step = torch.arange(values.numel(), device=values.device) - offsets[sample_of_action(offsets)]
    longest = int(offsets.diff().max()) if offsets.numel() > 1 else 0
    shift = 1
    while shift < longest:
        earlier = torch.zeros_like(values)
        earlier[shift:] = values[:-shift]
        values = values + earlier.masked_fill(step < shift, 0.0)
        shift *= 2
    return values


def whiten(values: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(values - mean) / sqrt(variance + epsilon) over all actions, with the sample variance, as verl's masked_whiten; unchanged for one action."""
    if values.numel() < 2:
        return values
    return (values - values.mean()) * torch.rsqrt(values.var() + epsilon)


@dataclass(frozen=True)
class Groups:
    """The prompt groups of a batch. Ids are any integers, members may be interleaved and groups differ in size.

    A sample without actions is no member of any group: nothing of it can be trained, and no reward of it is known.
    """

    index: Tensor  # int64 [samples], 0 .. groups - 1
    member: Tensor  # bool [samples]
    size: Tensor  # int64 [groups], members

    @classmethod
    def of(cls, group: Tensor, offsets: Tensor) -> Groups:
        ids, index = torch.unique(group, return_inverse=True)
        member = offsets.diff() > 0
        return cls(index, member, torch.zeros_like(ids, dtype=torch.int64).index_add_(0, index, member.to(torch.int64)))

    def total(self, values: Tensor) -> Tensor:
        """[samples] -> [groups]: the sum over the members."""
        return values.new_zeros(self.size.numel()).index_add_(0, self.index, values.masked_fill(~self.member, 0.0))

    def mean(self, values: Tensor) -> Tensor:
        """[samples] -> [groups]: the mean over the members, 0 for a group without members."""
        return self.total(values) / self.size.clamp(min=1)

    def maximum(self, values: Tensor) -> Tensor:
        """Non-negative [samples] -> [groups]: the maximum over the members, 0 for a group without members."""
        return values.new_zeros(self.size.numel()).scatter_reduce_(0, self.index, values.masked_fill(~self.member, 0.0), "amax")

    def has_peers(self) -> Tensor:
        """bool [samples]: the sample's group has at least two members."""
        return (self.size > 1)[self.index]

    def ordinal(self) -> Tensor:
        """int64 [samples]: how many members of the sample's group stand before it; samples without actions have none of their own."""
        order = torch.argsort(self.index * 2 + (~self.member).long(), stable=True)  # by group, members first
        counts = torch.bincount(self.index, minlength=self.size.numel())
        first = (counts.cumsum(0) - counts)[self.index[order]]
        ordinal = torch.empty_like(self.index)
        ordinal[order] = torch.arange(order.numel(), device=order.device) - first
        return ordinal
