"""Invertible layout operations between the tensors of a Hugging Face checkpoint and one Megatron parameter.

Every operation works on full (unsharded) tensors: `to_megatron` joins Hugging Face tensors into the Megatron one and
`to_hf` takes them apart again, bit for bit. `unshard` puts the full Megatron tensor together from the shards of a parallel group.

A rank's shard is made of one span of each Hugging Face tensor, so that a rank need not read the rest: `span` says which, and
`to_megatron` of the layout's `share` joins the spans into the shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """One Hugging Face tensor is one Megatron tensor, sharded along `dim` (None: every rank holds all of it)."""

    dim: int | None = None

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part

    def to_hf(self, full: Tensor) -> list[Tensor]:
        return [full]

    def span(self, length: int, size: int, rank: int) -> slice:
        """The part of a Hugging Face tensor of `length` along `dim` that belongs to the shard of `rank` among `size`. Raises ValueError if it is uneven."""
        if length % size:
            raise ValueError(f"{length} cannot be cut into {size} equal shards")
        return slice(length // size * rank, length // size * (rank + 1))

    def share(self, size: int, rank: int) -> Self:
        """The layout of the shard of `rank` among `size` for itself."""
        return self

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The full tensor from the slices of all ranks, in rank order."""
        return shards[0] if self.dim is None or len(shards) == 1 else torch.cat(list(shards), self.dim)


@dataclass(frozen=True)
class GatedPair(Whole):
    """gate_proj and up_proj [ffn, hidden] -> linear_fc1 [2 ffn, hidden]. Each rank holds its slice of gate above its slice of up."""

    dim: int | None = 0

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        gate, up = parts
        return torch.cat([gate, up], 0)

    def to_hf(self, full: Tensor) -> list[Tensor]:
        return list(full.chunk(2, 0))

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([half[part] for part in (0, 1) for half in halves], 0)


@dataclass(frozen=True)
class Transposed(Whole):
    """[inputs, outputs] -> [outputs, inputs]."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return part.t()

    def to_hf(self, full: Tensor) -> list[Tensor]:
        return [full.t().contiguous()]


@dataclass(frozen=True)
class InterleavedPair(Whole):
    """gate_up_proj [hidden, 2 ffn], or its bias [2 ffn], with gate in the even and up in the odd columns -> linear_fc1 [2 ffn, ...], gate above up."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        rows = part.transpose(0, -1)
        return torch.cat([rows[::2], rows[1::2]], 0)

    def to_hf(self, full: Tensor) -> list[Tensor]:
        rows = torch.stack(full.chunk(2, 0), 1).flatten(0, 1)
        return [rows.transpose(0, -1).contiguous()]


@dataclass(frozen=True)
class GroupedQKV(Whole):
    """q [heads d, ...], k and v [groups d, ...] -> linear_qkv [groups (heads/groups + 2) d, ...].

    Megatron keeps, for each query group, its query heads, then its key head, then its value head, so that a plain cut
    along dimension 0 gives every tensor-parallel rank whole groups. Serves weights [rows, hidden] and biases [rows].
    """

    dim: int | None = 0
    num_groups: int = 1
    head_dim: int = 1

    def share(self, size: int, rank: int) -> Self:
        return replace(self, num_groups=self.num_groups // size)

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.reshape(self.num_groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def to_hf(self, full: Tensor) -> list[Tensor]:
        grouped = full.reshape(self.num_groups, -1, *full.shape[1:])
        query_rows = grouped.shape[1] - 2 * self.head_dim
        return [part.flatten(0, 1) for part in grouped.split([query_rows, self.head_dim, self.head_dim], 1)]


@dataclass(frozen=True)
class PaddedVocabulary(Whole):
    """[vocab, hidden] -> [padded_vocab, hidden]. Padding rows are zero; every consumer masks them, and export drops them."""

    dim: int | None = 0
    vocab_size: int = 0
    padded_vocab_size: int = 0

    def span(self, length: int, size: int, rank: int) -> slice:
        own = super().span(self.padded_vocab_size, size, rank)
        return slice(min(own.start, length), min(own.stop, length))

    def share(self, size: int, rank: int) -> Self:
        own = self.span(self.vocab_size, size, rank)
        return replace(self, vocab_size=own.stop - own.start, padded_vocab_size=self.padded_vocab_size // size)

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        (part,) = parts
        return torch.nn.functional.pad(part, (0, 0, 0, self.padded_vocab_size - self.vocab_size))

    def to_hf(self, full: Tensor) -> list[Tensor]:
        return [full[: self.vocab_size]]
