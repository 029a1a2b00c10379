"""Which samples share a forward pass, and the forward pass's flat arrays.

Everything here is index work on one process. The driver packs the samples of a step once for the whole world, so that
every data-parallel rank runs the same number of microbatches and no rank waits in a collective for one that another never starts.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from otb_megatron.types import Microbatch, Trajectories

# Length at which causal attention costs as much as all matrix products of a layer: 24 h^2 FLOPs a token for the products of a
# standard layer and 2 h l for attention over l tokens give l = 12 h, here for a hidden size of 4096. The balance depends on it weakly.
ATTENTION_PARITY_TOKENS = 12 * 4096


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple of `multiple`, both in tokens."""
    return -(-length // multiple) * multiple


def schedule(lengths: Sequence[int], *, num_replicas: int, max_tokens: int, divisor: int = 1) -> list[list[list[int]]]:
    """Packs all samples of a step and deals the microbatches to the model replicas.

    The cost of a sample of l tokens is taken as l (l + ATTENTION_PARITY_TOKENS), which is proportional to its FLOPs and adds without rounding.

    What holds for every input:
    - each sample is in exactly one microbatch;
    - a microbatch holds at most `max_tokens` tokens, except that a longer sample is alone in one;
    - every replica has the same number of microbatches, at least one and a multiple of `divisor`; what is missing to that is
      filled with empty microbatches;
    - the number of microbatches is the smallest such number into which a best-fit-decreasing packing fits;
    - equal arguments give equal results;
    - the microbatches of one replica come in order of falling cost, so that the k-th ones of all replicas, which meet in
      expert-parallel collectives, cost about the same.

    Args:
        lengths: [samples] padded tokens of each sample.
        num_replicas: data-parallel size.
        max_tokens: token budget of a microbatch.
        divisor: Megatron's interleaved schedule asks for a multiple of the pipeline size here; otherwise 1.

    Returns:
        [replica][microbatch] -> sample indices, ascending; [] is a filler.
    """
    if any(length <= 0 for length in lengths):
        raise ValueError("every sample has at least one token")
    fitting = _best_fit(lengths, max_tokens)
    num_microbatches = padded_length(max(len(fitting), 1), num_replicas * divisor)
    cost = [length * (length + ATTENTION_PARITY_TOKENS) for length in lengths]
    bins = _spread(cost, lengths, max_tokens, num_microbatches) or _spread(lengths, lengths, max_tokens, num_microbatches)
    if bins is None:  # so tight that only the packing that gave the number fits
        bins = fitting + [[] for _ in range(num_microbatches - len(fitting))]
    return _deal([sorted(samples) for samples in bins], cost, num_replicas)


def _best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sample, the longest first, goes where it leaves the least room."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for sample in _heaviest_first(lengths):
        at = bisect.bisect_left(rooms, (lengths[sample], 0))
        if at < len(rooms):
            free, index = rooms.pop(at)
            bins[index].append(sample)
        else:
            free, index = max(max_tokens, lengths[sample]), len(bins)
            bins.append([sample])
        bisect.insort(rooms, (free - lengths[sample], index))
    return bins


def _spread(weight: Sequence[int], lengths: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    """Each sample, the heaviest first, goes to the lightest bin that has room for it; None when one finds no room."""
    oversized = [sample for sample, length in enumerate(lengths) if length > max_tokens]
    bins = [[sample] for sample in oversized] + [[] for _ in range(num_bins - len(oversized))]
    load = np.zeros(num_bins)
    room = np.full(num_bins, max_tokens)
    room[: len(oversized)] = 0
    for sample in _heaviest_first(weight):
        if lengths[sample] > max_tokens:
            continue
        lightest = int(np.where(room >= lengths[sample], load, np.inf).argmin())
        if room[lightest] < lengths[sample]:
            return None
        bins[lightest].append(sample)
        load[lightest] += weight[sample]
        room[lightest] -= lengths[sample]
    return bins


def _deal(bins: list[list[int]], cost: Sequence[int], num_replicas: int) -> list[list[list[int]]]:
    """Rounds of falling cost: in each, the replica with the least work so far takes the costliest of the `num_replicas` bins."""
    bin_cost = [sum(cost[sample] for sample in samples) for samples in bins]
    order = _heaviest_first(bin_cost)
    replicas: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    work = [0] * num_replicas
    for start in range(0, len(order), num_replicas):
        by_work = sorted(range(num_replicas), key=lambda replica: (work[replica], replica))
        for replica, index in zip(by_work, order[start : start + num_replicas], strict=True):
            replicas[replica].append(bins[index])
            work[replica] += bin_cost[index]
    return replicas


def _heaviest_first(weight: Sequence[int]) -> list[int]:
    return sorted(range(len(weight)), key=lambda index: (-weight[index], index))


def build_microbatch(
    trajectories: Trajectories, samples: Sequence[int], *, sequence_multiple: int, total_multiple: int, pad_token_id: int, min_tokens: int = 0
) -> Microbatch:
    """Lays `samples` out one after the other for one forward pass.

    Each sample is padded by itself to `sequence_multiple`. What the total lacks to `min_tokens` and `total_multiple` is a sequence of
    its own, of padding only and at the end, so that a sample is laid out, and split over context-parallel ranks, the same way
    whatever its neighbours. `cu_seqlens` covers every token. Without samples the microbatch is one such sequence.

    Args:
        samples: indices into `trajectories`, in the order they take.
        sequence_multiple: 2 x context-parallel size (zigzag halves), 1 without context parallelism.
        total_multiple: tensor-parallel size x sequence_multiple; a multiple of it.
        pad_token_id: a valid token id; nothing is predicted from it and no sample attends to it.
        min_tokens: the least total; the tokens of the longest pack where those of all replicas must be equally long.
    """
    if total_multiple % sequence_multiple:
        raise ValueError(f"total_multiple={total_multiple} is not a multiple of sequence_multiple={sequence_multiple}")
    token_offsets, action_offsets = trajectories.token_offsets.tolist(), trajectories.action_offsets.tolist()
    padded = [padded_length(token_offsets[sample + 1] - token_offsets[sample], sequence_multiple) for sample in samples]
    total = padded_length(max(sum(padded), min_tokens, 1), total_multiple)
    if total > sum(padded):
        padded.append(total - sum(padded))

    tokens = torch.full((total,), pad_token_id, dtype=torch.int64)
    is_padding = torch.ones(total, dtype=torch.bool)
    recorded = trajectories.routed_experts
    experts = None if recorded is None else recorded.new_full((total, *recorded.shape[1:]), -1)
    rows, index = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    start = 0
    for sample, length in zip(samples, padded, strict=False):  # `padded` may end with the sequence of padding
        first, last = token_offsets[sample], token_offsets[sample + 1]
        placed = slice(start, start + last - first)
        tokens[placed] = trajectories.tokens[first:last]
        is_padding[placed] = False
        if experts is not None:
            experts[placed] = recorded[first:last]  # type: ignore[index]
        actions = torch.arange(action_offsets[sample], action_offsets[sample + 1])
        rows.append(trajectories.action_positions[actions] + (start - first - 1))
        index.append(actions)
        start += length

    action_index = torch.cat(index)
    return Microbatch(
        tokens=tokens,
        position_ids=torch.cat([torch.arange(length) for length in padded]),
        is_padding=is_padding,
        cu_seqlens=torch.tensor([0, *accumulate(padded)], dtype=torch.int32),
        max_seqlen=max(padded),
        action_rows=torch.cat(rows),
        targets=trajectories.tokens[trajectories.action_positions[action_index]],
        action_index=action_index,
        action_offsets=torch.tensor([0, *accumulate(part.numel() for part in index[1:])], dtype=torch.int64),
        routed_experts=experts,
    )
