"""The sending end of a weight transfer, in the trainer's rank 0."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import Work

from otb_megatron.rollout.calls import Deadline, raise_failures, wait_for_all
from otb_megatron.rollout.transfer import TensorMetadata, TransferGroup, buckets, open_store

# Ray learns of a process's end a little later than its sockets do: by tenths of a second, or by seconds where every core is busy.
_NEWS_S = 15.0


class WeightSender:
    """Streams whole updates to every worker of every engine at once.

    A transfer that fails leaves the engines without a whole set of weights; the next `send` joins them anew.
    """

    def __init__(self, engines: Mapping[str, Any], *, workers_per_engine: int, bucket_bytes: int, timeout_s: float, device: torch.device):
        self._engines = engines
        self._workers_per_engine = workers_per_engine
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._device = device
        self._group: TransferGroup | None = None

    def send(self, metadata: Sequence[TensorMetadata], tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Sends one update and returns when every engine samples from it.

        Args:
            metadata: every tensor of the model in the order of sending, with names of the Hugging Face checkpoint.
            tensors: their names and values, on any device.
            version: the engines' name for the new weights.

        Raises:
            ValueError: `tensors` differs from `metadata`, or a name comes twice.
            UserError, RuntimeError: as `wait_for_all`.
        """
        if twice := [name for name, count in Counter(tensor.name for tensor in metadata).items() if count > 1]:
            raise ValueError(f"tensors to send more than once: {', '.join(twice)}")
        deadline = Deadline(self._timeout_s, "rollout.weight_transfer_timeout_s")
        try:
            if self._group is None:
                self._connect(deadline)
            delivery = {
                "names": [tensor.name for tensor in metadata],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in metadata],
                "shapes": [list(tensor.shape) for tensor in metadata],
            }
            receipts = self._call("receive_weights", delivery)
            self._stream(metadata, tensors, receipts, deadline)
            wait_for_all(receipts, deadline, "taking new weights")
            wait_for_all(self._call("finish_weights", version), deadline, "switching to new weights")
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _connect(self, deadline: Deadline) -> None:
        wait_for_all({name: engine.__ray_ready__.remote() for name, engine in self._engines.items()}, deadline, "answering")
        address = ray.util.get_node_ip_address()
        store = open_store(address, self._timeout_s)
        world_size = 1 + len(self._engines) * self._workers_per_engine
        connection = {
            "address": address,
            "port": store.port,
            "world_size": world_size,
            "bucket_bytes": self._bucket_bytes,
            "timeout_s": self._timeout_s,
        }
        offsets = first_ranks(len(self._engines), self._workers_per_engine)
        calls = {name: engine.connect.remote(connection | {"first_rank": rank}) for (name, engine), rank in zip(self._engines.items(), offsets, strict=True)}
        with _blaming(calls, deadline, "joining the weight transfer"):
            self._group = TransferGroup(address, store.port, rank=0, world_size=world_size, device=self._device, timeout_s=self._timeout_s, store=store)
        wait_for_all(calls, deadline, "joining the weight transfer")

    def _stream(self, metadata: Sequence[TensorMetadata], tensors: Iterator[tuple[str, Tensor]], receipts: Mapping[str, Any], deadline: Deadline) -> None:
        """Broadcasts bucket after bucket; the next one is gathered while the last one travels."""
        travelling: Work | None = None
        filled = _fill_buckets(metadata, tensors, self._bucket_bytes, self._device)
        while True:
            try:
                flat = next(filled, None)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # a receiver that is gone needs no word, and must not hide what happened here
                    self._group.give_word(go_on=False)
                raise
            with _blaming(receipts, deadline, "taking new weights"):
                if travelling is not None:
                    travelling.wait(deadline.remaining)
                self._group.give_word(go_on=True)
                if flat is None:
                    return
                travelling = self._group.broadcast(flat)

    def _call(self, method: str, argument: Any) -> dict[str, Any]:
        return {name: getattr(engine, method).remote(argument) for name, engine in self._engines.items()}


@contextlib.contextmanager
def _blaming(calls: Mapping[str, Any], deadline: Deadline, doing: str) -> Iterator[None]:
    """Replaces torch's error about a lost or slow connection with one that names the engine."""
    try:
        yield
    except Exception:
        ray.wait(list(calls.values()), timeout=min(_NEWS_S, deadline.remaining_s))
        raise_failures(calls, doing)
        if deadline.remaining_s == 0:
            wait_for_all(calls, deadline, doing)
        raise


def first_ranks(num_engines: int, workers_per_engine: int) -> list[int]:
    """Rank in the transfer group of each engine's first worker; rank 0 is the sender."""
    return [1 + index * workers_per_engine for index in range(num_engines)]


def _fill_buckets(metadata: Sequence[TensorMetadata], tensors: Iterator[tuple[str, Tensor]], max_bytes: int, device: torch.device) -> Iterator[Tensor]:
    """The tensors of each bucket as one flat tensor on `device`; raises ValueError where `tensors` is not what `metadata` says."""
    for bucket in buckets(metadata, max_bytes):
        parts = []
        for expected in bucket:
            name, tensor = next(tensors, (None, None))
            if tensor is None:
                raise ValueError(f"the tensors to send end before {expected.name}")
            if (name, tensor.dtype, tuple(tensor.shape)) != (expected.name, expected.dtype, expected.shape):
                raise ValueError(
                    f"tensor to send: {name} {tensor.dtype} {list(tensor.shape)}, but its metadata says {expected.name} {expected.dtype} {list(expected.shape)}"
                )
            parts.append(tensor.detach().reshape(-1).to(device))
        yield torch.cat(parts)
    if (extra := next(tensors, None)) is not None:
        raise ValueError(f"tensor {extra[0]} is not in the metadata of the update")
