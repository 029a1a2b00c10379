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
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, Work

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


class TransferGroup:
    """The sender and all receivers. Each must make the same calls in the same order.

    Before every bucket, and after the last one, the sender says over gloo that all is well. One that cannot go on says
    that instead, so that no receiver waits in a broadcast that nobody starts; on a GPU nothing could end that.
    """

    def __init__(self, address: str, port: int, *, rank: int, world_size: int, device: torch.device, timeout_s: float, store: TCPStore | None = None):
        """Returns once every rank has joined.

        Args:
            address: of the sender's store; see `open_store`.
            rank: 0 for the sender.
            device: of the tensors to be sent: NCCL carries those of a GPU, gloo all others.
            timeout_s: of each word and each broadcast.
            store: the sender's own; None connects to it.
        """
        timeout = timedelta(seconds=timeout_s)
        self._store = store or TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
        self._words = self._tensors = ProcessGroupGloo(PrefixStore("words", self._store), rank, world_size, timeout)
        if device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL  # builds of torch for CPUs lack it

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._tensors = ProcessGroupNCCL(PrefixStore("tensors", self._store), rank, world_size, options)

    def give_word(self, *, go_on: bool) -> None:
        """Sender: the receivers may go on, or the update breaks off here."""
        _broadcast(self._words, torch.tensor([int(go_on)])).wait()

    def await_word(self) -> None:
        """Receiver: returns when it may go on; raises RuntimeError if the sender breaks off."""
        word = torch.zeros(1, dtype=torch.int64)
        _broadcast(self._words, word).wait()
        if not word.item():
            raise RuntimeError("the sender broke off the update")

    def broadcast(self, flat: Tensor) -> Work:
        """Starts to copy the sender's `flat` into every receiver's."""
        return _broadcast(self._tensors, flat)

    def close(self) -> None:
        """Ends what is under way and closes the connections."""
        self._tensors.abort()
        self._tensors = self._words = None
        self._store = None


def open_store(address: str, timeout_s: float) -> TCPStore:
    """The sender's rendezvous, on a free port that is then in its `port`."""
    return TCPStore(address, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def _broadcast(group: ProcessGroup, tensor: Tensor) -> Work:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)
