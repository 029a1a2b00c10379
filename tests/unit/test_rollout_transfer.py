"""Buckets, ranks and the transfer group, without Ray and without vLLM."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from otb_megatron.rollout.sender import first_ranks
from otb_megatron.rollout.transfer import TensorMetadata, TransferGroup, buckets, open_store

CPU = torch.device("cpu")


def metadata(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[TensorMetadata]:
    return [TensorMetadata(f"t{index}", dtype, shape) for index, shape in enumerate(shapes)]


def test_buckets_hold_at_most_so_many_bytes_and_one_dtype():
    """12, 12, 40, 4 and 4 bytes in buckets of 24: the third is larger than a bucket and travels alone, the last two differ in dtype."""
    tensors = [*metadata((3,), (1, 3), (10,), (1,)), TensorMetadata("half", torch.bfloat16, (2,))]
    assert [[tensor.name for tensor in bucket] for bucket in buckets(tensors, 24)] == [["t0", "t1"], ["t2"], ["t3"], ["half"]]
    assert list(buckets([], 24)) == []
    assert TensorMetadata("scalar", torch.float64, ()).num_bytes == 8


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 60))
def test_every_tensor_is_in_one_bucket_in_order(lengths: list[int], max_bytes: int):
    tensors = metadata(*((length,) for length in lengths))
    cut = list(buckets(tensors, max_bytes))
    assert [tensor for bucket in cut for tensor in bucket] == tensors
    assert all(len(bucket) == 1 or sum(tensor.num_bytes for tensor in bucket) <= max_bytes for bucket in cut)


def test_first_ranks_leave_rank_zero_to_the_sender():
    """Three engines of two workers each: with the sender they fill ranks 0 to 6 without overlap."""
    assert first_ranks(3, 2) == [1, 3, 5]
    assert first_ranks(1, 1) == [1]


class Receivers:
    """Two receivers in threads of this process."""

    def __init__(self, timeout_s: float):
        self.received: dict[int, list[Tensor]] = {1: [], 2: []}
        self.errors: dict[int, str] = {}
        store = open_store("127.0.0.1", timeout_s)
        self.threads = [threading.Thread(target=self._receive, args=(rank, store.port, timeout_s), daemon=True) for rank in (1, 2)]
        for thread in self.threads:
            thread.start()
        self.sender = TransferGroup("127.0.0.1", store.port, rank=0, world_size=3, device=CPU, timeout_s=timeout_s, store=store)

    def _receive(self, rank: int, port: int, timeout_s: float) -> None:
        group = TransferGroup("127.0.0.1", port, rank=rank, world_size=3, device=CPU, timeout_s=timeout_s)
        try:
            while True:
                group.await_word()
                flat = torch.empty(4)
                group.broadcast(flat).wait()
                self.received[rank].append(flat)
        except RuntimeError as error:
            self.errors[rank] = str(error)

    def join(self, seconds: float) -> None:
        start = time.monotonic()
        for thread in self.threads:
            thread.join(seconds)
        assert time.monotonic() - start < seconds


def test_all_receivers_get_every_bucket_until_the_sender_breaks_off():
    receivers = Receivers(timeout_s=30)
    for value in (1.0, 2.0):
        receivers.sender.give_word(go_on=True)
        receivers.sender.broadcast(torch.full((4,), value)).wait()
    receivers.sender.give_word(go_on=False)
    receivers.join(10)
    assert {rank: [flat.tolist() for flat in received] for rank, received in receivers.received.items()} == dict.fromkeys((1, 2), [[1.0] * 4, [2.0] * 4])
    assert receivers.errors == dict.fromkeys((1, 2), "the sender broke off the update")


def test_a_closed_sender_ends_the_wait_of_its_receivers():
    receivers = Receivers(timeout_s=30)
    receivers.sender.close()
    receivers.join(10)
    assert receivers.errors.keys() == {1, 2}


def test_a_sender_that_says_nothing_is_waited_for_no_longer_than_the_deadline():
    receivers = Receivers(timeout_s=1)
    receivers.join(10)
    assert receivers.errors.keys() == {1, 2}
    with pytest.raises(RuntimeError):
        receivers.sender.give_word(go_on=True)
