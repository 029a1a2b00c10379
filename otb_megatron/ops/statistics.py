"""Log-probability, entropy and OTB's sum of squares of every token, under tensor parallelism, without holding the logits of all tokens.

Per token with target y, pi = softmax(logits / temperature):

    log_prob = log pi(y)        entropy = -sum_v pi(v) log pi(v)        rest = sum over v != y of pi(v)^2

All three come from three sums over v != y (see `row_sums`) which merge by rescaling, as the partial sums of an online softmax do.
The sums of the tiles of one rank and those of the ranks of a group are merged by the same function. Communication of a forward
pass: one gather of HEADER numbers per rank (it lets every rank see a fault of any), and one gather of 5 float64 per token and rank.
A backward pass communicates nothing; gradients of replicated inputs are this rank's share.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from otb_megatron.ops.row_sums import ELSEWHERE, IGNORED, LN_2, LOG2_E, Coefficients, RowSums, pick_row_sums
from otb_megatron.types import PolicyStatistics, UserError

IGNORED_TARGET = -100  # torch's convention: statistics and gradient of such a token are zero
TILE_COLUMNS = 4096  # with MAX_TILE_TOKENS a matmul large enough to run at full speed; 16 MiB of float32
MAX_TILE_TOKENS = 1024
TILE_SHARE_TOKENS = 256  # a tile is never larger than this many whole rows of the local vocabulary: 1/16 of a float32 [4096, vocab / tp]


def reference_policy_statistics(logits: Tensor, targets: Tensor, temperature: float | Tensor = 1.0) -> PolicyStatistics:
    """The definition, in plain torch on whole rows. The oracle of every other form; differentiable in all three.

    Args:
        logits: [tokens, vocab], any floating dtype; float64 gives the reference values.
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
    """Statistics from the last hidden states, fused with the vocab-parallel output projection. Logits exist one tile at a time and
    are computed again in the backward pass.

    Args:
        hidden: [tokens, hidden] the same on every rank of the group.
        weight: [padded vocab / tp, hidden] this rank's rows of the output projection, in the dtype of `hidden`.
        targets: [tokens] int64 global token ids, the same on every rank; IGNORED_TARGET marks a token without statistics.
        vocab_size: true vocabulary; further rows of the weight are padding, are never read and get zero gradient.
        group: tensor-parallel group; None means one rank and no collective. Every rank of it must make the call, with any number of
            tokens including none.
        temperature: number or [tokens]; log-probs are those of softmax(logits / temperature). No gradient flows to it.
        entropy_grad, rest_grad: make `entropy`, `rest` differentiable. `log_prob` always is.
        chunk_tokens: tokens in a tile; None chooses by size.
        accumulate_into_main_grad: Megatron's convention for float32 gradient accumulation: the weight gradient is added to
            `weight.main_grad` in the backward pass, `weight.grad_added_to_main_grad` is set where the weight has it, and autograd
            gets a placeholder or nothing.

    Returns:
        float32 [tokens] each. The gradient with respect to `hidden` is this rank's share: its sum over the group is the caller's to take.

    Raises:
        UserError: on every rank of the group, for a target outside the vocabulary, shards that cannot hold the vocabulary or differ in
            size, a temperature that is not positive, NaN or infinite logits, or ranks that disagree on the number of tokens.
    """
    if hidden.dtype != weight.dtype or hidden.shape[1:] != weight.shape[1:]:
        raise ValueError(f"hidden {tuple(hidden.shape)} {hidden.dtype} does not fit the weight {tuple(weight.shape)} {weight.dtype}")
    call = _Call.prepare(hidden.shape[0], weight.shape[0], targets, vocab_size, group, temperature, hidden.device)
    statistics = _Fused.apply(hidden, weight, call, chunk_tokens, entropy_grad, rest_grad, accumulate_into_main_grad)
    return PolicyStatistics(*statistics)


def policy_statistics_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    entropy_grad: bool = False,
    rest_grad: bool = False,
    chunk_tokens: int | None = None,
) -> PolicyStatistics:
    """Statistics from vocab-parallel logits [tokens, padded vocab / tp], float32, bfloat16 or float16, which are not changed.

    Other arguments, result and errors as in `policy_statistics`. Sums are float32 or better whatever the dtype of the logits. The
    gradient is exact for this rank's columns; padded columns get zero.
    """
    call = _Call.prepare(logits.shape[0], logits.shape[1], targets, vocab_size, group, temperature, logits.device)
    return PolicyStatistics(*_FromLogits.apply(logits, call, chunk_tokens, entropy_grad, rest_grad))


class _Call(NamedTuple):
    """What a forward pass and its backward pass share: the checked, rank-local form of the arguments."""

    columns: int  # columns of this rank that are not padding
    target: Tensor  # int64 [tokens], column of this rank, ELSEWHERE or IGNORED
    scale: Tensor  # float32 [tokens], log2(e) / temperature
    group: dist.ProcessGroup | None
    row_sums: RowSums

    @classmethod
    def prepare(
        cls,
        tokens: int,
        shard: int,
        targets: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup | None,
        temperature: float | Tensor,
        device: torch.device,
    ) -> _Call:
        if targets.shape != (tokens,):
            raise ValueError(f"{tokens} tokens came with targets of shape {tuple(targets.shape)}")
        temperature = torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(tokens)
        _check_arguments(tokens, shard, targets, vocab_size, temperature, group)
        first = shard * (0 if group is None else dist.get_rank(group))
        columns = min(max(vocab_size - first, 0), shard)
        local = targets - first
        target = torch.where((local >= 0) & (local < columns), local, ELSEWHERE)
        target = torch.where(targets == IGNORED_TARGET, IGNORED, target)
        return cls(columns, target, LOG2_E / temperature, group, pick_row_sums(device))


class _Header(NamedTuple):
    """What every rank tells the others before it computes. All numbers, so that it travels as one float64 row."""

    tokens: float
    vocab_size: float
    shard: float  # columns of the rank, padding included
    bad_target_token: float  # first token whose target is outside the vocabulary, or -1
    bad_target: float
    bad_temperature_token: float  # first token whose temperature is not a positive finite number, or -1
    bad_temperature: float


def _first_bad(bad: Tensor, values: Tensor) -> list[Tensor]:
    """Index of the first true entry of `bad` [n > 0], or -1, and the value there."""
    index = bad.int().argmax()
    return [torch.where(bad.any(), index, -1).double(), values[index].double()]


def _check_arguments(tokens: int, shard: int, targets: Tensor, vocab_size: int, temperature: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raises the same UserError on every rank of the group when any of them was called wrongly. One gather of a header per rank."""
    row = torch.tensor([tokens, vocab_size, shard, -1, 0, -1, 0], dtype=torch.float64, device=targets.device)
    if tokens > 0:
        bad_target = ((targets < 0) | (targets >= vocab_size)) & (targets != IGNORED_TARGET)
        bad_temperature = ~((temperature > 0) & torch.isfinite(temperature))
        row[3:] = torch.stack(_first_bad(bad_target, targets) + _first_bad(bad_temperature, temperature))
    headers = [_Header(*values) for values in _gather(row, group).tolist()]
    faults = []
    for name, values in (
        ("number of tokens", [h.tokens for h in headers]),
        ("vocabulary size", [h.vocab_size for h in headers]),
        ("number of vocabulary columns", [h.shard for h in headers]),
    ):
        if len(set(values)) > 1:
            faults.append(f"the ranks of the tensor-parallel group disagree on the {name}: {[int(v) for v in values]} in rank order")
    if vocab_size < 1 or vocab_size > shard * len(headers):
        faults.append(f"a vocabulary of {vocab_size} does not fit {len(headers)} shards of {shard} columns of the output projection")
    for rank, h in enumerate(headers):
        if h.bad_target_token >= 0:
            faults.append(f"rank {rank}: target {h.bad_target:.0f} of token {h.bad_target_token:.0f} is outside the vocabulary of {h.vocab_size:.0f}")
        if h.bad_temperature_token >= 0:
            faults.append(f"rank {rank}: temperature {h.bad_temperature:g} of token {h.bad_temperature_token:.0f} is not a positive number")
    if faults:
        raise UserError("policy statistics: " + "; ".join(faults))


def _gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[...] of each rank -> [ranks, ...] on every rank."""
    if group is None or dist.get_world_size(group) == 1:
        return values.unsqueeze(0)
    result = values.new_empty(dist.get_world_size(group), *values.shape)
    dist.all_gather_into_tensor(result.view(-1), values.contiguous().view(-1), group=group)
    return result


def _merge(partials: Tensor) -> Tensor:
    """Partial sums [parts, 5, tokens] of disjoint sets of columns -> the sums [5, tokens] of their union (see `row_sums`)."""
    reference = partials[:, 0].amax(0)
    shift = partials[:, 0] - reference
    factor = torch.exp2(shift)
    s, r, t = partials[:, 1], partials[:, 2], partials[:, 3]
    return torch.stack(
        [reference, (factor * s).sum(0), (factor.square() * r).sum(0), (factor * (t + shift * s)).sum(0), partials[:, 4].sum(0)]
    )


class _Finished(NamedTuple):
    """float64 [tokens] each."""

    log_prob: Tensor
    entropy: Tensor
    rest: Tensor
    normalizer: Tensor  # log2 sum_v 2^(scale z_v)


def _finish(sums: Tensor, call: _Call) -> _Finished:
    """Sums over this rank's columns [5, tokens] -> statistics over the whole vocabulary. One gather of the sums over the group.

    No term cancels: log_prob comes from the odds of the rest against y, and entropy is a sum of terms that are all >= 0.
    """
    if sums.shape[1] == 0:  # the ranks have agreed on it: none of them gathers
        return _Finished(*sums[:4])
    gathered = _gather(sums, call.group)
    reference, s, r, t, target = _merge(gathered)
    ignored = call.target == IGNORED
    if not torch.isfinite(torch.where(ignored, 0.0, reference + s + r + t + target)).all():
        _raise_not_finite(gathered, ignored)
    gap = target - reference
    log2_s = torch.log2(s)
    log2_z = torch.logaddexp2(log2_s, gap)
    log_prob = -torch.logaddexp(LN_2 * (log2_s - gap), torch.zeros_like(gap))
    entropy = -log_prob * log_prob.exp() + LN_2 * (torch.exp2(log2_s - log2_z) * log2_z - t * torch.exp2(-log2_z))
    rest = r * torch.exp2(-2 * log2_z)
    return _Finished(*(torch.where(ignored, 0.0, x) for x in (log_prob, entropy, rest, reference + log2_z)))


def _raise_not_finite(gathered: Tensor, ignored: Tensor) -> None:
    bad = ~torch.isfinite(gathered).all(1) & ~ignored  # [ranks, tokens]
    places = bad.nonzero().tolist()
    rank, token = places[0]
    raise UserError(
        f"policy statistics: the logits of token {token} on rank {rank} of the tensor-parallel group are NaN or infinite "
        f"({len(places)} such pairs of token and rank among {bad.shape[1]} tokens). The weights or the hidden states have diverged."
    )


def _coefficients(call: _Call, finished: _Finished, gradients: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Coefficients:
    """Gradients with respect to log_prob, entropy and rest -> those of the logits (z = logits, b = 1 / temperature, H = entropy):

    d log_prob / d z_v = b (1[v=y] - pi_v)
    d entropy  / d z_v = -b pi_v (log pi_v + H)
    d rest     / d z_v = 2 b pi_v (pi_v 1[v != y] - rest)
    """
    g_log_prob, g_entropy, g_rest = (torch.zeros_like(finished.log_prob) if g is None else g.double() for g in gradients)
    inverse = LN_2 * call.scale.double()  # 1 / temperature
    log_prob, entropy, rest, normalizer = finished
    pi = log_prob.exp()
    return Coefficients(
        normalizer=normalizer,
        constant=(-inverse * (g_log_prob + g_entropy * entropy + 2 * g_rest * rest)).float(),
        linear=(-inverse * LN_2 * g_entropy).float(),
        square=(2 * inverse * g_rest).float(),
        target=(inverse * (-g_log_prob * torch.expm1(log_prob) - pi * (g_entropy * (log_prob + entropy) + 2 * g_rest * rest))).float(),
    )


def _result(ctx: Any, finished: _Finished, entropy_grad: bool, rest_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    log_prob, entropy, rest = (x.float() for x in finished[:3])
    ctx.mark_non_differentiable(*([] if entropy_grad else [entropy]), *([] if rest_grad else [rest]))
    return log_prob, entropy, rest


def _rows(call: _Call, rows: slice, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Targets and scales of some tokens, for the tile of columns [first, first + columns)."""
    target = call.target[rows]
    local = target - first
    inside = (target >= 0) & (local >= 0) & (local < columns)
    return torch.where(inside, local, target.clamp(max=ELSEWHERE)), call.scale[rows]


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: _Call, chunk_tokens: int | None, entropy_grad: bool, rest_grad: bool) -> tuple[Tensor, ...]:
        tokens = logits.shape[0]
        ctx.chunk = chunk_tokens or TILE_SHARE_TOKENS
        sums = torch.empty(5, tokens, dtype=torch.float64, device=logits.device)
        for start in range(0, tokens, ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            sums[:, rows] = call.row_sums.sums(logits[rows], call.columns, *_rows(call, rows, 0, call.columns))
        finished = _finish(sums, call)
        ctx.call = call
        ctx.save_for_backward(logits, *finished)
        return _result(ctx, finished, entropy_grad, rest_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, *finished = ctx.saved_tensors
        call: _Call = ctx.call
        coefficients = _coefficients(call, _Finished(*finished), gradients)
        result = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for start in range(0, logits.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            chunk = Coefficients(*(c[rows] for c in coefficients))
            call.row_sums.gradients(logits[rows], call.columns, *_rows(call, rows, 0, call.columns), chunk, out=result[rows])
        return result, None, None, None, None


class _Tiles(NamedTuple):
    """How the [tokens, columns] logits of a rank are cut. A rank without columns (all padding) has one tile of none."""

    tokens: list[slice]
    columns: list[slice]
    buffer: Tensor  # float32, holds one tile

    @classmethod
    def plan(cls, num_tokens: int, num_columns: int, chunk_tokens: int | None, device: torch.device) -> _Tiles:
        width = min(max(num_columns, 1), TILE_COLUMNS)
        height = min(chunk_tokens or min(MAX_TILE_TOKENS, TILE_SHARE_TOKENS * num_columns // width), max(num_tokens, 1))
        height = max(height, 1)
        return cls(
            [slice(i, min(i + height, num_tokens)) for i in range(0, num_tokens, height)],
            [slice(i, min(i + width, num_columns)) for i in range(0, max(num_columns, 1), width)],
            torch.empty(height * width, dtype=torch.float32, device=device),
        )

    def project(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [n, hidden], weight [columns, hidden] -> logits float32 [n, columns] in the buffer."""
        tile = self.buffer[: hidden.shape[0] * weight.shape[0]].view(hidden.shape[0], weight.shape[0])
        if hidden.dtype == torch.float32 or not hidden.is_cuda:  # the CPU has no such product for half precision; the copies are of one tile
            return torch.mm(hidden.float(), weight.float().t(), out=tile)
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32, out=tile)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in float32. `a` is float32 and is rounded to the dtype of `b` where the device multiplies in that."""
    if b.dtype == torch.float32 or not b.is_cuda:
        total.addmm_(a, b.float())
    else:
        torch.addmm(total, a.to(b.dtype), b, out_dtype=torch.float32, out=total)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, call: _Call, chunk_tokens: int | None, entropy_grad: bool, rest_grad: bool, into_main_grad: bool
    ) -> tuple[Tensor, ...]:
        tiles = _Tiles.plan(hidden.shape[0], call.columns, chunk_tokens, hidden.device)
        sums = torch.empty(5, hidden.shape[0], dtype=torch.float64, device=hidden.device)
        for rows in tiles.tokens:
            parts = []
            for columns in tiles.columns:
                logits = tiles.project(hidden[rows], weight[columns])
                parts.append(call.row_sums.sums(logits, logits.shape[1], *_rows(call, rows, columns.start, logits.shape[1])))
            sums[:, rows] = _merge(torch.stack(parts))
        finished = _finish(sums, call)
        ctx.call, ctx.chunk_tokens = call, chunk_tokens
        ctx.main_grad = weight.main_grad if into_main_grad else None
        ctx.save_for_backward(hidden, weight, *finished)
        return _result(ctx, finished, entropy_grad, rest_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, *finished = ctx.saved_tensors
        call: _Call = ctx.call
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        coefficients = _coefficients(call, _Finished(*finished), gradients)
        tiles = _Tiles.plan(hidden.shape[0], call.columns, ctx.chunk_tokens, hidden.device)
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        weight_grad = ctx.main_grad
        if needs_weight and weight_grad is None:
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for rows in tiles.tokens:
            chunk = Coefficients(*(c[rows] for c in coefficients))
            chunk_grad = torch.zeros_like(hidden[rows], dtype=torch.float32)
            for columns in tiles.columns:
                tile = tiles.project(hidden[rows], weight[columns])
                call.row_sums.gradients(tile, tile.shape[1], *_rows(call, rows, columns.start, tile.shape[1]), chunk, out=tile)
                if needs_hidden:
                    _accumulate(chunk_grad, tile, weight[columns])
                if needs_weight:
                    _accumulate(weight_grad[columns], tile.t(), hidden[rows])
            if needs_hidden:
                hidden_grad[rows] = chunk_grad
        if needs_weight:
            weight_grad = _weight_gradient(weight, weight_grad, ctx.main_grad is not None)
        return hidden_grad, weight_grad, None, None, None, None, None


def _weight_gradient(weight: Tensor, total: Tensor, in_main_grad: bool) -> Tensor | None:
    """What autograd gets for the weight. After accumulation into `main_grad`, Megatron's DDP hook wants a placeholder where it is marked."""
    if not in_main_grad:
        return total.to(weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    placeholder = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return placeholder(weight.shape, dtype=weight.dtype, device=weight.device)
