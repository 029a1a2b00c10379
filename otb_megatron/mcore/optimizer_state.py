"""The distributed optimizer's state in a checkpoint: each rank writes and reads its own part where it lies.

Megatron-Core's form that crosses every layout, `fully_reshardable`, stores each state under its parameter's name and whole shape. To save it,
Megatron gathers the state of all data-parallel ranks on each of them, and to load it, each reads all of it into new tensors: at two
ranks, 6 to 10 times the weights of host memory a rank. A rank's own part of a parameter is a range of the flattened parameter, and a
range is a few rectangles. Those are written and read here, under the same names and shapes: the files of both ways can be read by both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def keep_in_place(optimizer: DistributedOptimizer) -> None:
    """Makes an optimizer's `fully_reshardable` state its own part, without a copy. Megatron has no hook for another form."""
    optimizer.sharded_param_state_fully_reshardable = functools.partial(_own_state, optimizer)
    optimizer.load_parameter_state_from_fully_reshardable = functools.partial(_take_over, optimizer)


def _own_state(optimizer: DistributedOptimizer, model_state: Any, is_loading: bool = False, metadata: Any = None) -> dict[int, Any]:
    """By number of the parameter: its rectangles, and the tensors that they are views of, which stay on this rank."""
    places = {place.data: place for place in nested_values(extract_matching_values(model_state, _is_sharded)[0])}
    state = {}
    for number, (parameter, span) in enumerate(_own_ranges(optimizer)):
        found = optimizer._get_main_param_and_optimizer_states(parameter)
        tensors = {name: found[name].detach() for name in ("param", *optimizer.optimizer_state_keys)}  # not Adam's step: the groups have it
        shards = {name: _shards(places[parameter], name, tensor, span) for name, tensor in tensors.items()}
        state[number] = {"shards": shards, "tensors": LocalNonpersistentObject(tensors)}
    return state


@torch.no_grad()
def _take_over(optimizer: DistributedOptimizer, state: dict[int, Any]) -> None:
    """Gives the optimizer the tensors of `_own_state`, into which the checkpoint has been read: most are its own already."""
    for number, (parameter, _) in enumerate(_own_ranges(optimizer)):
        optimizer._set_main_param_and_optimizer_states(parameter, state[number]["tensors"])
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, range]]:
    """This rank's parameters, each with the range of its elements that the rank updates."""
    for buckets in itertools.chain.from_iterable(ranges.values() for ranges in optimizer.gbuf_ranges):
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, range(ranges["param"].start, ranges["param"].end)


def _is_sharded(value: Any) -> bool:
    return isinstance(value, (ShardedTensor, ShardedTensorFactory))


def _shards(place: ShardedTensor | ShardedTensorFactory, name: str, tensor: Tensor, span: range) -> list[ShardedTensor]:
    """The rectangles of a parameter's `span`, as views of `tensor`, which holds the values of `name` there."""
    parts = list(nested_values(place.build())) if isinstance(place, ShardedTensorFactory) else [place]  # gate and up projection
    shards, first = [], 0
    for part in parts:
        last = first + math.prod(part.local_shape)
        inside = range(max(span.start, first) - first, min(span.stop, last) - first)
        position = first + inside.start - span.start
        for offset, shape in rectangles(tuple(part.local_shape), inside.start, inside.stop):
            length = math.prod(shape)
            shards.append(_shard(part, name, tensor[position : position + length].view(shape), offset))
            position += length
        first = last
    return shards


def _shard(part: ShardedTensor, name: str, data: Tensor, offset: tuple[int, ...]) -> ShardedTensor:
    """A rectangle at `offset` in `part`, which is this rank's part of a parameter in the whole model."""
    assert len(part.replica_id) == 3, part  # type: ignore[arg-type] # (pipeline, tensor, data parallel)
    layer = part.prepend_axis_num  # layers are stacked in the checkpoint; Megatron has no rectangles of less than a layer's rank
    data = data.view((1,) * layer + tuple(data.shape))
    inside = (0,) * layer + offset
    return ShardedTensor(
        key=f"optimizer.state.{name}.{part.key}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_shape=part.global_shape,
        global_offset=tuple(start + further for start, further in zip(part.global_offset, inside, strict=True)),
        axis_fragmentations=None,  # no regular grid
        replica_id=(*part.replica_id[:2], 0),  # type: ignore[index] # no other data-parallel rank has it
        allow_shape_mismatch=part.allow_shape_mismatch,
    )


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts the elements `start` to `stop` of a flattened tensor into rectangles of the tensor, in order.

    Yields:
        offset and shape of each; at most 2 d - 1 in d dimensions.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, end = -(-start // row), stop // row  # of the whole rows
    if first > end:
        yield from _in_row(shape, end, start - end * row, stop - end * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < end:
        yield (first, *(0 for _ in shape[1:])), (end - first, *shape[1:])
    yield from _in_row(shape, end, 0, stop - end * row)


def _in_row(shape: tuple[int, ...], number: int, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, size in rectangles(shape[1:], start, stop):
        yield (number, *offset), (1, *size)
