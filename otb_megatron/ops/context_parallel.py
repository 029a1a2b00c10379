"""Which rows of a packed microbatch a context-parallel rank holds, and the way back. Pure index maths on CPU tensors.

Causal attention makes late positions dearer than early ones. Each sequence is therefore cut into 2 cp equal parts, and rank r holds
parts r and 2 cp - 1 - r ("zigzag"), sequence after sequence. This is the split of Transformer Engine's
`thd_get_partitioned_indices`, which Megatron-Core uses for packed sequences.

Targets must be shifted, and per-token values cumulated, on whole sequences: before the split or after the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor


def local_rows(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Rows of the microbatch that a rank holds, in the order in which it holds them.

    Args:
        cu_seqlens: int [sequences + 1] offsets of the padded sequences of the whole microbatch, from 0.

    Returns:
        int64 [tokens / cp_size]; over the ranks each row of the microbatch occurs once.

    Raises:
        ValueError: a sequence is not padded to a multiple of 2 cp_size (any length will do where cp_size is 1).
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"context-parallel rank {cp_rank} is outside a group of {cp_size}")
    bounds = cu_seqlens.to(device="cpu", dtype=torch.int64)
    if cp_size == 1:
        return torch.arange(int(bounds[-1]))
    lengths = bounds.diff()
    if (lengths % (2 * cp_size) != 0).any():
        raise ValueError(f"padded sequences of {lengths.tolist()} tokens cannot be cut into {2 * cp_size} equal parts for context parallelism of {cp_size}")
    part = lengths // (2 * cp_size)
    starts = torch.stack([bounds[:-1] + cp_rank * part, bounds[:-1] + (2 * cp_size - 1 - cp_rank) * part], dim=1).flatten()
    return _ranges(starts, part.repeat_interleave(2))


def sequence_order(cu_seqlens: Tensor, cp_size: int) -> Tensor:
    """The way back: `torch.cat(values of rank 0, 1, ...)[sequence_order(cu_seqlens, cp_size)]` stands in the order of the microbatch.

    Returns:
        int64 [tokens].
    """
    held = torch.cat([local_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    order = torch.empty_like(held)
    order[held] = torch.arange(held.numel())
    return order


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """starts, lengths int64 [n] -> the ranges [start, start + length), one after the other."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)
