"""The row passes of `row_sums` on a CPU: one read of the logits from memory, vectorised by LLVM.

2^t for t <= 0 is formed from additions, multiplications and integer shifts only, because LLVM turns such a loop into vector
instructions and a call of libm's exp2 not. Compiled code is cached where the disk can be written, so that only a first run on a machine compiles.
"""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from otb_megatron.jit import njit
from otb_megatron.ops.row_sums import EMPTY_REFERENCE, IGNORED, Coefficients

BLOCK_COLUMNS = 1024  # 4 KiB: the second look at a block finds it in the first-level cache (512 to 4096 tried)
COPY_BYTES = 1 << 20  # logits that are not contiguous float32 are converted this much at a time, which stays in the second-level cache

F32 = np.float32
I32 = np.int32
# Polynomial of 2^f on [-1/2, 1/2], lowest power first: least relative error (9.2e-8) among those with 2^0 = 1, by reweighted least squares.
P0, P1, P2, P3, P4, P5 = (F32(p) for p in (1.0, 0.693147003650665, 0.240222424268723, 0.0555073358118534, 0.00967151299118996, 0.00132647273130715))
ONE_TERM_DOMINATES = 1.125  # S below this is the term of the maximum and little else. That is then summed alone, to keep its digits
ROUND = F32(1.5 * 2**23)  # x + ROUND - ROUND rounds |x| < 2^22 to an integer, which is left in the low bits of x + ROUND
LOWEST_POWER = F32(-126.0)  # smaller ones count as 2^-126
LOWEST = F32(EMPTY_REFERENCE)


@intrinsic
def _fma(context, a, b, c):
    """a b + c with one rounding, so that scale z - reference keeps its absolute accuracy for logits of any size."""
    return types.float32(types.float32, types.float32, types.float32), lambda ctx, builder, signature, args: builder.fma(*args)


@intrinsic
def _float_of_bits(context, x):
    return types.float32(types.int32), lambda ctx, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def _bits_of_float(context, x):
    return types.int32(types.float32), lambda ctx, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


# fastmath=False has to be said: a callee inherits the flags of its caller, and reassociation would undo the rounding below.
@njit(fastmath=False)
def _exp2(t):
    t = LOWEST_POWER if t < LOWEST_POWER else t  # in this form NaN stays NaN
    shifted = t + ROUND
    f = t - (shifted - ROUND)
    p = _fma(_fma(_fma(_fma(_fma(P5, f, P4), f, P3), f, P2), f, P1), f, P0)
    return _float_of_bits(I32(_bits_of_float(p) + I32(_bits_of_float(shifted) << I32(23))))


@njit()
def _highest(block):
    """Largest float of a block, found among its bit patterns: integer maxima vectorise, float maxima that must respect NaN do not.

    Patterns of floats >= 0 are ordered as the floats are; those of floats < 0 are smaller than these and ordered the other way.
    """
    bits = block.view(np.int32)
    best = I32(-(2**31))
    for j in range(bits.size):
        best = max(best, bits[j])
    if best < 0:
        best = I32(2**31 - 1)
        for j in range(bits.size):
            best = min(best, bits[j])
    return _float_of_bits(best)


@njit(fastmath={"reassoc", "nsz", "contract"})
def _block_sums(block, scale, reference):
    s, r, w = F32(0), F32(0), F32(0)
    for j in range(block.size):
        t = _fma(block[j], scale, -reference)
        power = _exp2(t)
        s += power
        r += power * power
        w += power * t
    return s, r, w


@njit(fastmath={"reassoc", "nsz", "contract"})
def _sums_below_highest(row, columns, y, scale, highest):
    s, r, w = F32(0), F32(0), F32(0)
    for j in range(columns):
        t = (row[j] - highest) * scale
        power = _exp2(t) if row[j] < highest and j != y else F32(0)
        s += power
        r += power * power
        w += power * t
    return s, r, w


@njit()
def _add_block(block, scale, sums):
    """Adds a block to the running (maximum, reference, S, R, T) of its row, rescaling them where it holds a new maximum."""
    if block.size == 0:
        return sums
    highest, reference, s, r, t = sums
    block_highest = _highest(block)
    if not block_highest <= highest:  # NaN takes this branch and stays in the sums
        highest = block_highest
        shift = np.float64(reference)
        reference = F32(highest * scale)
        shift -= np.float64(reference)
        factor = 2.0**shift
        s, r, t = s * factor, r * factor * factor, (t + shift * s) * factor
    block_s, block_r, block_t = _block_sums(block, scale, reference)
    return highest, reference, s + block_s, r + block_r, t + block_t


@njit()
def _sums(logits, columns, target, scale, result):
    for i in range(logits.shape[0]):
        row, y = logits[i], target[i]
        sums = (LOWEST, LOWEST, 0.0, 0.0, 0.0)
        for start in range(0, columns, BLOCK_COLUMNS):
            stop = min(start + BLOCK_COLUMNS, columns)
            if start <= y < stop:
                sums = _add_block(row[start:y], scale[i], sums)
                sums = _add_block(row[y + 1 : stop], scale[i], sums)
            else:
                sums = _add_block(row[start:stop], scale[i], sums)
        highest, result[0, i], s, result[2, i], result[3, i] = sums
        result[1, i] = s
        if 0.0 < s < ONE_TERM_DOMINATES:
            s, r, t = _sums_below_highest(row, columns, y, scale[i], highest)
            result[0, i], result[1, i], result[2, i], result[3, i] = np.float64(highest) * np.float64(scale[i]), 1.0 + s, 1.0 + r, t
        result[4, i] = np.float64(row[y]) * np.float64(scale[i]) if y >= 0 else 0.0


@njit(fastmath=False)
def _row_gradient(row, scale, high, low, constant, linear, square, out):
    for j in range(row.size):
        t = _fma(row[j], scale, -high) - low
        t = F32(0.0) if t > F32(0.0) else t  # pi <= 1; rounding of the normalizer must not leave the range of _exp2
        pi = _exp2(t)
        out[j] = pi * (constant + linear * t + square * pi)


@njit()
def _gradients(logits, columns, target, scale, high, low, constant, linear, square, target_gradient, out):
    for i in range(logits.shape[0]):
        if target[i] == IGNORED:
            out[i] = F32(0.0)
            continue
        _row_gradient(logits[i, :columns], scale[i], high[i], low[i], constant[i], linear[i], square[i], out[i, :columns])
        out[i, columns:] = F32(0.0)
        if target[i] >= 0:
            out[i, target[i]] = target_gradient[i]


class NumbaRowSums:
    """Both passes on contiguous float32 rows; other tiles go through small float32 copies."""

    def sums(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor) -> Tensor:
        result = torch.empty(5, tile.shape[0], dtype=torch.float64)
        for rows in _pieces(tile):
            _sums(_contiguous(tile[rows]).numpy(), columns, target[rows].numpy(), scale[rows].contiguous().numpy(), result[:, rows].numpy())
        return result

    def gradients(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor, coefficients: Coefficients, out: Tensor) -> None:
        high = coefficients.normalizer.float()
        low = (coefficients.normalizer - high).float()
        per_row = [x.contiguous() for x in (scale, high, low, *coefficients[1:])]
        for rows in _pieces(tile):
            logits = _contiguous(tile[rows])
            direct = out.dtype == torch.float32 and out.is_contiguous()
            gradient = out[rows] if direct else torch.empty_like(logits)
            _gradients(logits.numpy(), columns, target[rows].numpy(), *(x[rows].numpy() for x in per_row), gradient.numpy())
            if not direct:
                out[rows] = gradient


def _contiguous(rows: Tensor) -> Tensor:
    return rows.detach().float().contiguous()


def _pieces(tile: Tensor) -> list[slice]:
    tokens, width = tile.shape
    height = tokens if tile.dtype == torch.float32 and tile.is_contiguous() else COPY_BYTES // max(4 * width, 1)
    height = max(height, 1)
    return [slice(start, start + height) for start in range(0, tokens, height)]
