"""Aggregation weights: what each mode means, on uneven lengths and samples without actions, and that cutting the batch changes nothing."""

from __future__ import annotations

import pytest
import torch

from otb_megatron.algorithms import action_weights

OFFSETS = torch.tensor([0, 1, 1, 4, 6])  # lengths 1, 0, 3, 2: three samples count
LOSS = torch.tensor([6.0, 1.0, 2.0, 3.0, 4.0, 8.0])


@pytest.mark.parametrize(
    "aggregation, length, expected",
    [
        ("token-mean", None, 24 / 6),
        ("seq-mean-token-sum", None, (6 + 6 + 12) / 3),
        ("seq-mean-token-mean", None, (6 + 2 + 6) / 3),
        ("seq-mean-token-sum-norm", 4, (6 + 6 + 12) / 3 / 4),
    ],
)
def test_weighted_sum_is_the_aggregated_loss(aggregation, length, expected):
    weights = action_weights(OFFSETS, aggregation, length)
    assert weights.dtype == torch.float32 and weights.shape == LOSS.shape
    assert float((weights * LOSS).sum()) == pytest.approx(expected, rel=1e-6)


def test_docstring_example():
    offsets = torch.tensor([0, 1, 4])
    assert action_weights(offsets, "token-mean").tolist() == pytest.approx([1 / 4] * 4)
    assert action_weights(offsets, "seq-mean-token-mean").tolist() == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])


def test_no_action_at_all():
    for offsets in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        assert action_weights(offsets, "seq-mean-token-mean").shape == (0,)


def test_the_fixed_normaliser_must_be_given():
    with pytest.raises(ValueError, match="needs its fixed normaliser"):
        action_weights(OFFSETS, "seq-mean-token-sum-norm")


def test_weights_of_a_long_batch_sum_to_one():
    """A million actions in 1000 samples: float32 weights, no drift of their sum."""
    weights = action_weights(torch.arange(0, 1_000_001, 1000), "token-mean")
    assert float(weights.double().sum()) == pytest.approx(1.0, abs=1e-6)
