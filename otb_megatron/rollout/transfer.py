"""What the sender of new weights and its receivers inside vLLM agree on: names and shapes, buckets, and the process group.

The trainer's sender is rank 0 of a group of its own and every vLLM worker is one further rank. The group is
stateless: it never touches torch.distributed's default group, which belongs to Megatron in the one process
and to vLLM in the other. This module imports neither Ray nor vLLM, since both sides import it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, Store, TCPStore, Work

BACKEND = "otb_megatron"
"""The name under which the receiver is registered in vLLM's weight-transfer factory."""


@dataclass(frozen=True)
class TensorMetadata:
    """One tensor of the Hugging Face checkpoint format, as it travels."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def buckets(metadata: Sequence[TensorMetadata], max_bytes: int) -> Iterator[Sequence[TensorMetadata]]:
    """Cuts `metadata`, in order, into runs of one dtype and at most `max_bytes` (one tensor at least)."""
    start, size = 0, 0
    for index, tensor in enumerate(metadata):
        if index > start and (tensor.dtype != metadata[start].dtype or size + tensor.num_bytes > max_bytes):
            yield metadata[start:index]
            start, size = index, 0
        size += tensor.num_bytes
    if start < len(metadata):
        yield metadata[start:]


def open_store(address: str, port: int, *, is_sender: bool, timeout_s: float) -> TCPStore:
    """The rendezvous. The sender opens it on `port` 0, a free port, which `store.port` then names to the receivers."""
    return TCPStore(address, port, is_master=is_sender, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def open_group(store: Store, rank: int, world_size: int, device: torch.device, timeout_s: float) -> ProcessGroup:
    """Joins the transfer group: NCCL on a CUDA `device`, gloo elsewhere. Returns once every rank has joined."""
    store = PrefixStore("weight_transfer", store)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, world_size, options)
    from torch.distributed import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, world_size, timeout)


def broadcast(group: ProcessGroup, tensor: Tensor) -> Work:
    """Starts the broadcast of `tensor` from the sender, rank 0, into every receiver's `tensor`."""
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)
