"""Log-probability, entropy and OTB's sum of squares of every token, under tensor parallelism, without holding the logits of all tokens.

Per token with target y and pi = softmax(logits / temperature):

    log_prob = log pi(y)        entropy = -sum_v pi(v) log pi(v)        rest = sum over v != y of pi(v)^2

All three come from three sums over v != y, which merge by rescaling as those of an online softmax do: one function merges the tiles
of a rank and the ranks of a group. Communication: a forward pass gathers a header of seven numbers, by which every rank sees a fault of any, while it
computes its own sums, and then five float64 per token and rank; a backward pass communicates nothing. Both gathers are read on the
host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from otb_megatron.ops.agreement import Agreement, check_finite, gather
from otb_megatron.ops.partial_sums import Statistics, coefficients_of, merge, statistics_of
from otb_megatron.ops.row_sums import ELSEWHERE, IGNORED, LOG2_E, Coefficients, RowSums, pick_row_sums
from otb_megatron.types import PolicyStatistics

IGNORED_TARGET = -100  # torch's convention: statistics and gradient of such a token are zero

# A tile of 1024 x 4096 keeps a matmul busy and takes 16 MiB in float32. It is also never larger than 256 whole rows of the local
# vocabulary, so that memory stays below 1/16 of float32 [4096, vocab / tp] at any vocabulary and tensor-parallel size.
TILE_COLUMNS = 4096
TILE_TOKENS = 1024
TILE_TOKENS_OF_WHOLE_ROWS = 256


def reference_policy_statistics(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> PolicyStatistics:
    """The definition, in plain torch on whole rows and differentiable in all three. The oracle of the other forms.

    Args:
        logits: [tokens, vocab], any floating dtype, which is that of the result; float64 gives the reference values.
        targets: [tokens] int64.
        temperature: number or [tokens].
    """
    inverse = 1.0 / torch.as_tensor(temperature, dtype=logits.dtype, device=logits.device)
    log_pi = torch.log_softmax(logits * inverse.reshape(-1, 1), dim=-1)
    pi = log_pi.exp()
    column = targets.unsqueeze(1)
    return PolicyStatistics(
        log_prob=log_pi.gather(1, column).squeeze(1),
        entropy=-(pi * log_pi).sum(-1),
        rest=pi.square().scatter(1, column, 0.0).sum(-1),
    )


def policy_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy_grad: bool = False,
    rest_grad: bool = False,
    chunk_tokens: int | None = None,
    accumulate_into_main_grad: bool = False,
) -> PolicyStatistics:
    """Statistics from the last hidden states, fused with the vocab-parallel output projection.

    Logits exist one tile at a time, in float32, and are computed again in the backward pass.

    Args:
        hidden: [tokens, hidden] the same on every rank of the group.
        weight: [padded vocab / tp, hidden] this rank's rows of the output projection, in the dtype of `hidden`.
        targets: [tokens] int64 global token ids, the same on every rank; IGNORED_TARGET marks a token without statistics.
        vocab_size: true vocabulary. Rows of the weight beyond it are padding: never read, gradient zero.
        group: tensor-parallel group; None means one rank and no collective. Every rank of it must make the call, with the same
            number of tokens, which may be none.
        temperature: number or [tokens]. No gradient flows to it.
        entropy_grad, rest_grad: make `entropy`, `rest` differentiable. `log_prob` always is.
        chunk_tokens: tokens in a tile; None chooses by size.
        accumulate_into_main_grad: add the weight gradient to `weight.main_grad` in the backward pass, as Megatron's fused float32
            accumulation does: `weight.grad_added_to_main_grad` is set where the weight has it, and autograd gets a placeholder.

    Returns:
        float32 [tokens] each. The gradient of `hidden` is this rank's share: its sum over the group is the caller's to take.

    Raises:
        UserError: on every rank of the group, for a target outside the vocabulary, shards that cannot hold the vocabulary or differ in
            size, a temperature that is not positive, NaN or infinite logits, or ranks that disagree on the number of tokens.
    """
    if hidden.dtype != weight.dtype or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(f"hidden {tuple(hidden.shape)} {hidden.dtype} does not fit the weight {tuple(weight.shape)} {weight.dtype}")
    call = _Call.prepare(hidden, weight.shape[0], targets, vocab_size, group, temperature)
    return PolicyStatistics(*_Fused.apply(hidden, weight, call, chunk_tokens, entropy_grad, rest_grad, accumulate_into_main_grad))


def policy_statistics_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy_grad: bool = False,
    rest_grad: bool = False,
) -> PolicyStatistics:
    """Statistics from vocab-parallel logits [tokens, padded vocab / tp] in float32, bfloat16 or float16, which are read only.

    Other arguments, result and errors as in `policy_statistics`; padded columns are never read and get zero gradient. Sums are
    float32 or better whatever the dtype of the logits. Nothing of the size of the logits is allocated but their gradient.
    """
    call = _Call.prepare(logits, logits.shape[1], targets, vocab_size, group, temperature)
    return PolicyStatistics(*_FromLogits.apply(logits, call, entropy_grad, rest_grad))


class _Call(NamedTuple):
    """The arguments in rank-local form, and what the forward pass keeps of them for the backward pass."""

    columns: int  # columns of this rank that are not padding
    target: Tensor  # int64 [tokens], column of this rank, ELSEWHERE or IGNORED
    scale: Tensor  # float32 [tokens], log2(e) / temperature
    group: dist.ProcessGroup | None
    agreement: Agreement
    row_sums: RowSums

    @classmethod
    def prepare(cls, values: Tensor, columns: int, targets: Tensor, vocab_size: int, group: dist.ProcessGroup | None, temperature: float | Tensor) -> _Call:
        """values [tokens, ...]: hidden states or logits; columns: those of this rank, padding included."""
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"policy statistics of {values.dtype}: use float32, bfloat16 or float16, or reference_policy_statistics")
        if targets.shape != values.shape[:1]:
            raise ValueError(f"targets of shape {tuple(targets.shape)} do not fit values of shape {tuple(values.shape)}")
        temperature = torch.as_tensor(temperature, dtype=torch.float32, device=values.device).expand(targets.shape)
        ignored = targets == IGNORED_TARGET
        agreement = Agreement.begin(columns, targets, ignored, vocab_size, temperature, group)
        first = columns * (0 if group is None else dist.get_rank(group))
        own_columns = min(max(vocab_size - first, 0), columns)
        target = _local(targets, first, own_columns).masked_fill(ignored, IGNORED)
        return cls(own_columns, target, LOG2_E / temperature, group, agreement, pick_row_sums(values.device))

    def rows(self, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """Targets and scales for a tile."""
        target = self.target[rows]
        inside = _local(target, columns.start, columns.stop - columns.start)
        return torch.where(target == IGNORED, IGNORED, inside), self.scale[rows]

    def finish(self, sums: Tensor) -> Statistics:
        """Sums over this rank's columns [5, tokens] -> statistics over the whole vocabulary. One gather over the group."""
        self.agreement.check()
        ignored = self.target == IGNORED
        # The headers have shown that all ranks have as many tokens, so either all of them gather or none.
        gathered = gather(sums, self.group) if sums.shape[1] > 0 else sums.unsqueeze(0)
        check_finite(gathered, ignored)
        return Statistics(*(x.masked_fill(ignored, 0.0) for x in statistics_of(merge(gathered))))

    def coefficients(self, statistics: list[Tensor], gradients: tuple[Tensor | None, ...]) -> Coefficients:
        known = (torch.zeros_like(statistics[0]) if g is None else g for g in gradients)
        return coefficients_of(Statistics(*statistics), self.scale, *known)


def _local(targets: Tensor, first: int, columns: int) -> Tensor:
    """Ids -> positions within columns [first, first + columns), or ELSEWHERE."""
    local = targets - first
    return local.masked_fill((local < 0) | (local >= columns), ELSEWHERE)


def _result(ctx: Any, statistics: Statistics, entropy_grad: bool, rest_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    log_prob, entropy, rest = (x.float() for x in statistics[:3])
    ctx.mark_non_differentiable(*([] if entropy_grad else [entropy]), *([] if rest_grad else [rest]))
    ctx.set_materialize_grads(False)
    return log_prob, entropy, rest


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call, entropy_grad: bool, rest_grad: bool) -> tuple[Tensor, ...]:
        statistics = call.finish(call.row_sums.sums(logits, call.columns, call.target, call.scale))
        ctx.call = call
        ctx.save_for_backward(logits, *statistics)
        return _result(ctx, statistics, entropy_grad, rest_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        logits, *statistics = ctx.saved_tensors
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        call.row_sums.gradients(logits, call.columns, call.target, call.scale, call.coefficients(statistics, gradients), out=result)
        return result, None, None, None


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: _Call, chunk_tokens: int | None, entropy_grad: bool, rest_grad: bool, into_main_grad: bool
    ) -> tuple[Tensor, ...]:
        tiles = _Tiles.plan(hidden, call.columns, chunk_tokens)
        sums = torch.empty(5, hidden.shape[0], dtype=torch.float64, device=hidden.device)
        for rows in tiles.tokens:
            parts = []
            for columns in tiles.columns:
                logits = tiles.project(hidden[rows], weight[columns])
                parts.append(call.row_sums.sums(logits, logits.shape[1], *call.rows(rows, columns)))
            sums[:, rows] = merge(torch.stack(parts))
        statistics = call.finish(sums)
        ctx.call, ctx.chunk_tokens = call, chunk_tokens
        ctx.main_grad = weight.main_grad if into_main_grad else None
        ctx.save_for_backward(hidden, weight, *statistics)
        return _result(ctx, statistics, entropy_grad, rest_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        hidden, weight, *statistics = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        coefficients = call.coefficients(statistics, gradients)
        tiles = _Tiles.plan(hidden, call.columns, ctx.chunk_tokens)
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        weight_grad = ctx.main_grad
        if needs_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in tiles.tokens:
            rows_grad = hidden_grad[rows].float() if needs_hidden else None  # the rows themselves where the gradient is float32
            for columns in tiles.columns:
                tile = tiles.project(hidden[rows], weight[columns])
                call.row_sums.gradients(tile, tile.shape[1], *call.rows(rows, columns), coefficients.rows(rows), out=tile)
                if rows_grad is not None:
                    _accumulate(rows_grad, tile, weight[columns])
                if needs_weight:
                    _accumulate(weight_grad[columns], tile.t(), hidden[rows])
            if rows_grad is not None and rows_grad.dtype != hidden.dtype:
                hidden_grad[rows] = rows_grad
        if needs_weight:
            weight_grad = weight_grad.to(weight.dtype) if ctx.main_grad is None else _placeholder(weight)
        return hidden_grad, weight_grad if needs_weight else None, None, None, None, None, None


class _Tiles(NamedTuple):
    """How the [tokens, columns] logits of a rank are cut. A rank whose columns are all padding has one tile of none."""

    tokens: list[slice]
    columns: list[slice]
    buffer: Tensor  # float32, holds one tile

    @classmethod
    def plan(cls, hidden: Tensor, num_columns: int, chunk_tokens: int | None) -> _Tiles:
        num_tokens = hidden.shape[0]
        width = min(max(num_columns, 1), TILE_COLUMNS)
        if _multiplies_in_float32(hidden):
            width = min(width, max(1, TILE_TOKENS * TILE_COLUMNS // hidden.shape[1]))  # the copied rows of the weight count as well
        height = chunk_tokens or max(1, min(TILE_TOKENS, TILE_TOKENS_OF_WHOLE_ROWS * num_columns // width))
        return cls(
            [slice(start, min(start + height, num_tokens)) for start in range(0, num_tokens, height)],
            [slice(start, min(start + width, num_columns)) for start in range(0, max(num_columns, 1), width)],
            torch.empty(min(height, num_tokens) * width, dtype=torch.float32, device=hidden.device),
        )

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [n, hidden], weight [columns, hidden] -> logits float32 [n, columns] in the buffer."""
        tile = self.buffer[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], weight.shape[0])
        if hidden.dtype == torch.float32 or _multiplies_in_float32(hidden):
            return torch.mm(hidden.float(), weight.float().t(), out=tile)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=tile)


def _multiplies_in_float32(operand: Tensor) -> bool:
    """Whether half-precision operands are copied to float32, a tile at a time: a CPU has no product of them with a float32 result."""
    return operand.dtype != torch.float32 and not operand.is_cuda


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. `a` is float32; on a GPU it is rounded to a half-precision `b`, and the product is summed in float32 all the same."""
    if total.dtype == b.dtype or _multiplies_in_float32(b):
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=total.dtype, out=total)


def _placeholder(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient went to `main_grad`: Megatron's hooks want to run where they watch for it."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    fill = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return fill(weight.shape, dtype=weight.dtype, device=weight.device)
