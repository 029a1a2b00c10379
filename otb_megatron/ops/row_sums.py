"""The two row-wise passes over a tile of logits on which the policy statistics rest, and the choice of who computes them.

Everything is in bits: with scale = log2(e) / temperature, a logit z stands for 2^(scale z).

`sums` gives for each row float64 [5, tokens], over the first `columns` columns v other than the target y:
    reference   a number at max scale z_v; the other sums are relative to it
    S           sum of 2^t        t = scale z_v - reference
    R           sum of 4^t
    T           sum of 2^t t
    target      scale z_y, 0 where the target is not in this tile
The target is left out of the sums so that they keep their relative accuracy however close pi(y) is to one. NaN and infinite logits
leave a trace: at least one of the five is then not finite.

`gradients` turns a tile of logits into the gradient of the loss with respect to them.

A target is a column of the tile, or ELSEWHERE (another tile or rank holds it), or IGNORED (the row has no target: zero gradient).
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ELSEWHERE = -1
IGNORED = -2
LOG2_E = math.log2(math.e)
EMPTY_REFERENCE = torch.finfo(torch.float32).min  # reference of an empty sum: finite, so that no merge meets inf - inf


class Coefficients(NamedTuple):
    """The gradient of a row: pi_v (constant + linear log2 pi_v + square pi_v) for v != y, and `target` for y itself."""

    normalizer: Tensor  # float64 [tokens], log2 sum_v 2^(scale z_v) over the whole vocabulary
    constant: Tensor  # float32 [tokens]
    linear: Tensor  # float32 [tokens]
    square: Tensor  # float32 [tokens]
    target: Tensor  # float32 [tokens]

    def rows(self, rows: slice) -> Coefficients:
        return Coefficients(*(x[rows] for x in self))


class RowSums(Protocol):
    """One implementation of the two passes."""

    def sums(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor) -> Tensor:
        """tile [tokens, >= columns] float32, bfloat16 or float16; target int64 [tokens]; scale float32 [tokens] -> float64 [5, tokens]."""

    def gradients(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor, coefficients: Coefficients, out: Tensor) -> None:
        """Writes the gradient to `out`, which has the shape of `tile` or is `tile`. Columns from `columns` on get zeros."""


class PlainRowSums:
    """The plain form, in torch. Oracle of the others."""

    def sums(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor) -> Tensor:
        result = torch.zeros(5, tile.shape[0], dtype=torch.float64, device=tile.device)
        result[0] = EMPTY_REFERENCE
        if columns == 0:
            return result
        z = tile[:, :columns].float()
        here = (target >= 0).unsqueeze(1)
        column = target.clamp(min=0).unsqueeze(1)
        target_logit = torch.where(here, z.gather(1, column), 0.0)
        is_target = torch.zeros_like(z, dtype=torch.bool).scatter_(1, column, here)
        highest = z.masked_fill(is_target, EMPTY_REFERENCE).amax(1, keepdim=True)
        t = ((z - highest) * scale.unsqueeze(1)).masked_fill_(is_target, 0.0)
        power = torch.exp2(t).masked_fill_(is_target, 0.0)
        is_highest = (z == highest) & ~is_target
        factor = scale.double()
        result[0] = highest.squeeze(1).double() * factor
        # The terms that are 1 are counted, for next to a 1 the digits of small terms would be lost, and with them an entropy near 0.
        result[1] = is_highest.sum(1) + power.masked_fill(is_highest, 0.0).sum(1).double()
        result[2] = power.square().sum(1)
        result[3] = (power * t).sum(1)
        result[4] = target_logit.squeeze(1).double() * factor
        return result

    def gradients(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor, coefficients: Coefficients, out: Tensor) -> None:
        z = tile[:, :columns].float()
        # logits and normalizer may both be large: the difference is formed in float64
        t = (z.double() * scale.double().unsqueeze(1) - coefficients.normalizer.unsqueeze(1)).float()
        pi = torch.exp2(t)
        gradient = pi * (coefficients.constant.unsqueeze(1) + coefficients.linear.unsqueeze(1) * t + coefficients.square.unsqueeze(1) * pi)
        rows = (target >= 0).nonzero().squeeze(1)
        gradient[rows, target[rows]] = coefficients.target[rows]
        gradient.masked_fill_((target == IGNORED).unsqueeze(1), 0.0)
        out[:, :columns] = gradient
        out[:, columns:] = 0.0


def pick_row_sums(device: torch.device) -> RowSums:
    """The implementation for a device. Their compilers are imported only where they are used."""
    if device.type == "cpu":
        from otb_megatron.ops.row_sums_numba import NumbaRowSums

        return NumbaRowSums()
    if device.type == "cuda":
        from otb_megatron.ops.row_sums_triton import TritonRowSums

        return TritonRowSums()
    return PlainRowSums()
