"""The zigzag split: hand-written rows for a small case, and a round trip for every rank count."""

from __future__ import annotations

import pytest
import torch

from otb_megatron.ops.context_parallel import local_rows, sequence_order


def test_rows_of_two_packed_sequences():
    # cp = 2 cuts each sequence into 4 parts: rank 0 holds parts 0 and 3, rank 1 parts 1 and 2.
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32)  # parts of 1 row and of 2 rows
    assert local_rows(cu_seqlens, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert local_rows(cu_seqlens, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert sequence_order(cu_seqlens, 2).tolist() == [0, 6, 7, 1, 2, 3, 8, 9, 10, 11, 4, 5]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_values_return_to_sequence_order(cp_size):
    lengths = torch.tensor([2, 0, 6, 4]) * cp_size
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    values = torch.arange(int(cu_seqlens[-1])) * 7
    ranks = [values[local_rows(cu_seqlens, cp_size, rank)] for rank in range(cp_size)]
    assert {len(held) for held in ranks} == {len(values) // cp_size}
    assert torch.equal(torch.cat(ranks)[sequence_order(cu_seqlens, cp_size)], values)


def test_one_rank_holds_any_length_in_order():
    assert local_rows(torch.tensor([0, 3, 5]), 1, 0).tolist() == [0, 1, 2, 3, 4]


def test_cumulative_sum_needs_sequence_order():
    """A sum over time of per-rank values is right after the way back, and was not before it."""
    cu_seqlens = torch.tensor([0, 8])
    values = torch.arange(8.0)
    held = torch.cat([values[local_rows(cu_seqlens, 2, rank)] for rank in range(2)])
    expected = [0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0]
    assert held[sequence_order(cu_seqlens, 2)].cumsum(0).tolist() == expected
    assert held.cumsum(0)[sequence_order(cu_seqlens, 2)].tolist() != expected


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"\[4, 6\].*8 equal parts"):
        local_rows(torch.tensor([0, 4, 10]), 4, 0)
    with pytest.raises(ValueError, match="rank 2 is outside a group of 2"):
        local_rows(torch.tensor([0, 4]), 2, 2)
