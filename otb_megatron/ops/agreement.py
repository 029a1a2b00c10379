"""What the ranks of a tensor-parallel group tell each other, so that a fault of one is an error on every one."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from otb_megatron.types import UserError


class Header(NamedTuple):
    """The arguments of one rank's call. All numbers, so that it travels as one float64 row."""

    tokens: float
    vocab_size: float
    columns: float  # vocabulary columns of the rank, padding included
    bad_target_token: float  # first token whose target is outside the vocabulary, or -1
    bad_target: float
    bad_temperature_token: float  # first token whose temperature is not a positive finite number, or -1
    bad_temperature: float


def gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[...] of each rank, of one shape -> [ranks, ...] on every rank. No collective for a group of one."""
    if group is None or dist.get_world_size(group) == 1:
        return values.unsqueeze(0)
    result = values.new_empty(dist.get_world_size(group), *values.shape)
    dist.all_gather_single(result.view(-1), values.reshape(-1), group=group)  # gloo wants them flat
    return result


class Agreement(NamedTuple):
    """A gather of every rank's header that is under way while the rank computes. Nothing is known of the other ranks before `check`."""

    rows: Tensor  # float64 [ranks, 7]
    work: dist.Work | None

    @classmethod
    def begin(cls, columns: int, targets: Tensor, ignored: Tensor, vocab_size: int, temperature: Tensor, group: dist.ProcessGroup | None) -> Agreement:
        """Starts it. Every rank of the group must, and must come to `check`.

        Args:
            columns: vocabulary columns of this rank, padding included.
            targets, ignored, temperature: [tokens].
        """
        header = _header(columns, targets, ignored, vocab_size, temperature)
        if group is None or dist.get_world_size(group) == 1:
            return cls(header.unsqueeze(0), None)
        rows = header.new_empty(dist.get_world_size(group), len(header))
        return cls(rows, dist.all_gather_single(rows.view(-1), header, group=group, async_op=True))

    def check(self) -> None:
        """Raises the same UserError on every rank of the group when any of them was called wrongly."""
        if self.work is not None:
            self.work.wait()
        _raise_faults([Header(*row) for row in self.rows.tolist()])


def _raise_faults(headers: list[Header]) -> None:
    faults = []
    for name in ("tokens", "vocab_size", "columns"):
        values = [int(getattr(header, name)) for header in headers]
        if len(set(values)) > 1:
            faults.append(f"the ranks of the tensor-parallel group disagree on the number of {name}: {values} in rank order")
    largest, room = max(int(header.vocab_size) for header in headers), sum(int(header.columns) for header in headers)
    if not 1 <= largest <= room:
        faults.append(f"a vocabulary of {largest} does not fit an output projection of {room} columns in {len(headers)} shards")
    for rank, header in enumerate(headers):
        if header.bad_target_token >= 0:
            where = f"token {header.bad_target_token:.0f} on rank {rank}"
            faults.append(f"target {header.bad_target:.0f} of {where} is outside the vocabulary of {header.vocab_size:.0f}")
        if header.bad_temperature_token >= 0:
            faults.append(f"temperature {header.bad_temperature:g} of token {header.bad_temperature_token:.0f} on rank {rank} is not a positive number")
    if faults:
        raise UserError("policy statistics: " + "; ".join(faults))


def _header(columns: int, targets: Tensor, ignored: Tensor, vocab_size: int, temperature: Tensor) -> Tensor:
    row = torch.tensor([targets.numel(), vocab_size, columns, -1, 0, -1, 0], dtype=torch.float64, device=targets.device)
    if targets.numel() > 0:
        row[3:5] = _first_bad(((targets < 0) | (targets >= vocab_size)) & ~ignored, targets)
        row[5:7] = _first_bad(~((temperature > 0) & torch.isfinite(temperature)), temperature)
    return row


def _first_bad(bad: Tensor, values: Tensor) -> Tensor:
    """float64 [2]: index of the first true entry of `bad`, or -1, and the value there. Stays on the device."""
    index = bad.int().argmax()
    return torch.stack([torch.where(bad.any(), index, -1).double(), values[index].double()])


def check_finite(gathered: Tensor, ignored: Tensor) -> None:
    """Raises the same UserError on every rank when a sum of any rank is not finite: gathered [ranks, 5, tokens], ignored [tokens]."""
    bad = ~torch.isfinite(gathered.sum(1)) & ~ignored  # a sum with a NaN or infinite term is one itself
    if bad.any():
        places = bad.nonzero().tolist()
        rank, token = places[0]
        raise UserError(
            f"policy statistics: the logits of token {token} on rank {rank} of the tensor-parallel group are NaN or infinite "
            f"({len(places)} such tokens, counted per rank, of {bad.shape[1]}). The weights or the hidden states have diverged."
        )
