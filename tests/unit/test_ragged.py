"""Ragged arithmetic against loops over Python lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otb_megatron.algorithms.ragged import Groups, discounted_suffix_sums, prefix_sums, sample_of_action, sums, whiten


def test_scans_and_sums():
    """Lengths 0 to 40, discounts 1, 0.9, 0 and one per sample."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(0, 41 if seed % 2 else 3, size=rng.integers(0, 8))
        offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
        values = torch.from_numpy(rng.normal(size=lengths.sum()))
        parts = [part.tolist() for part in values.split(lengths.tolist())]
        discounts = [rng.uniform() for _ in parts] if seed % 4 == 3 else [(1.0, 0.9, 0.0)[seed % 3]] * len(parts)
        discount = torch.tensor(discounts, dtype=torch.float64) if seed % 4 == 3 else (discounts or [1.0])[0]
        suffix = [sum(d ** (k - t) * part[k] for k in range(t, len(part))) for part, d in zip(parts, discounts, strict=True) for t in range(len(part))]
        prefix = [sum(part[: t + 1]) for part in parts for t in range(len(part))]
        np.testing.assert_allclose(discounted_suffix_sums(values, offsets, discount).numpy(), suffix, atol=1e-12)
        np.testing.assert_allclose(prefix_sums(values, offsets).numpy(), prefix, atol=1e-12)
        np.testing.assert_allclose(sums(values, offsets).numpy(), [sum(part) for part in parts], atol=1e-12)
        assert sample_of_action(offsets).tolist() == [i for i, part in enumerate(parts) for _ in part]


def test_groups():
    """Ids 9, 4, 9, 9, 4 where the third sample has no actions: it is a member of no group."""
    groups = Groups.of(torch.tensor([9, 4, 9, 9, 4]), torch.tensor([0, 1, 3, 3, 4, 6]))
    values = torch.tensor([1.0, 2.0, 100.0, 3.0, 6.0])
    assert groups.index.tolist() == [1, 0, 1, 1, 0] and groups.size.tolist() == [2, 2]
    assert groups.total(values).tolist() == [8.0, 4.0] and groups.mean(values).tolist() == [4.0, 2.0]
    assert groups.maximum(values).tolist() == [6.0, 3.0]
    assert groups.has_peers().tolist() == [True] * 5
    assert groups.ordinal()[groups.member].tolist() == [0, 0, 1, 1]


def test_whiten():
    """(1, 2, 3): mean 2, sample variance 1. One value, and equal ones."""
    assert whiten(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    assert whiten(torch.tensor([5.0])).tolist() == [5.0]
    assert whiten(torch.tensor([5.0, 5.0])).tolist() == [0.0, 0.0]
