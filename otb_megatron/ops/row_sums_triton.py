"""The row passes of `row_sums` on a GPU: one program per row reads its logits once. Plain twin: `row_sums.PlainRowSums`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otb_megatron.ops.row_sums import EMPTY_REFERENCE, IGNORED, Coefficients

MAX_BLOCK_COLUMNS = 4096
NUM_WARPS = 8

_EMPTY = tl.constexpr(EMPTY_REFERENCE)
_IGNORED = tl.constexpr(IGNORED)
_FAR_BELOW = tl.constexpr(-1e30)  # finite, so that 0 times it is 0


@triton.jit
def _add_block(z, counted, factor, highest, ones, s, r, w):
    """Adds a block to the running sums of its row. The terms of S that are 1 are counted apart, as in the plain twin."""
    new_highest = tl.maximum(highest, tl.max(tl.where(counted, z, _EMPTY), axis=0))
    shift = tl.maximum(highest - new_highest, _FAR_BELOW) * factor
    rescale = tl.exp2(shift)
    t = tl.where(counted, (z - new_highest) * factor, 0.0)
    power = tl.where(counted, tl.exp2(t), 0.0)
    is_highest = counted & (z == new_highest)
    raised = new_highest > highest
    w = rescale * (w + shift * (s + ones)) + tl.sum(power * t, axis=0)
    s = tl.where(raised, rescale * (s + ones), s) + tl.sum(tl.where(is_highest, 0.0, power), axis=0)
    ones = tl.where(raised, 0.0, ones) + tl.sum(is_highest.to(tl.float32), axis=0)
    r = rescale * rescale * r + tl.sum(power * power, axis=0)
    return new_highest, ones, s, r, w


@triton.jit
def _sums_kernel(tile, stride_row, stride_column, columns, target, scale, result, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits = tile + row.to(tl.int64) * stride_row
    y = tl.load(target + row)
    factor = tl.load(scale + row)
    highest = _EMPTY
    ones = 0.0
    s = 0.0
    r = 0.0
    w = 0.0
    whole_blocks = columns // BLOCK * BLOCK
    for start in range(0, whole_blocks, BLOCK):  # loads without a mask are wide whatever the vocabulary is divisible by
        column = start + tl.arange(0, BLOCK)
        z = tl.load(logits + column.to(tl.int64) * stride_column).to(tl.float32)
        highest, ones, s, r, w = _add_block(z, column != y, factor, highest, ones, s, r, w)
    if whole_blocks < columns:
        column = whole_blocks + tl.arange(0, BLOCK)
        z = tl.load(logits + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0).to(tl.float32)
        highest, ones, s, r, w = _add_block(z, (column < columns) & (column != y), factor, highest, ones, s, r, w)
    z_y = tl.load(logits + y * stride_column, mask=y >= 0, other=0.0)
    wide_factor = factor.to(tl.float64)
    tl.store(result + row, highest.to(tl.float64) * wide_factor)
    tl.store(result + tokens + row, ones.to(tl.float64) + s.to(tl.float64))
    tl.store(result + 2 * tokens + row, r.to(tl.float64))
    tl.store(result + 3 * tokens + row, w.to(tl.float64))
    tl.store(result + 4 * tokens + row, z_y.to(tl.float64) * wide_factor)


@triton.jit
def _gradients_kernel(
    tile, stride_row, stride_column, columns, target, scale, high, low, constant, linear, square, target_gradient, out, out_row, out_column, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(target + row)
    z = tl.load(tile + row.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column, mask=column < columns, other=0.0).to(tl.float32)
    # The product is exact inside fma; the normalizer comes in two parts, so that large logits lose nothing.
    t = tl.minimum(tl.fma(z, tl.load(scale + row), -tl.load(high + row)) - tl.load(low + row), 0.0)
    pi = tl.exp2(t)
    gradient = pi * (tl.load(constant + row) + tl.load(linear + row) * t + tl.load(square + row) * pi)
    gradient = tl.where(column == y, tl.load(target_gradient + row), gradient)
    gradient = tl.where((column < columns) & (y != _IGNORED), gradient, 0.0)
    place = out + row.to(tl.int64) * out_row + column.to(tl.int64) * out_column
    tl.store(place, gradient.to(out.dtype.element_ty), mask=column < width)


class TritonRowSums:
    """Both passes on tiles of any float dtype and any strides."""

    def sums(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor) -> Tensor:
        tokens = tile.shape[0]
        result = torch.empty(5, tokens, dtype=torch.float64, device=tile.device)
        if tokens > 0:
            _sums_kernel[(tokens,)](
                tile, *tile.stride(), columns, target.contiguous(), scale.contiguous(), result, tokens, BLOCK=_block(columns), num_warps=NUM_WARPS
            )  # fmt: skip
        return result

    def gradients(self, tile: Tensor, columns: int, target: Tensor, scale: Tensor, coefficients: Coefficients, out: Tensor) -> None:
        tokens, width = tile.shape
        if tokens == 0 or width == 0:
            return
        high = coefficients.normalizer.float()
        low = (coefficients.normalizer - high).float()
        block = _block(width)
        per_row = [x.contiguous() for x in (target, scale, high, low, *coefficients[1:])]
        _gradients_kernel[(tokens, triton.cdiv(width, block))](
            tile, *tile.stride(), columns, *per_row, out, *out.stride(), width, BLOCK=block, num_warps=NUM_WARPS
        )  # fmt: skip


def _block(columns: int) -> int:
    return min(MAX_BLOCK_COLUMNS, triton.next_power_of_2(max(columns, 1)))
