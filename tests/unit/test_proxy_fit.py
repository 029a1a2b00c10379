"""Rank correlation and ratio quantiles by hand, and against the definition of a rank."""

from __future__ import annotations

import math

import numpy as np
import pytest

from otb_megatron.algorithms.proxy_fit import rank_correlation, ratio_quantiles


def test_rank_correlation_by_hand() -> None:
    """Without ties 1 - 6 sum d^2 / (n (n^2 - 1)): d = 0, -1, 1, 2, -2 and n = 5 give 1 - 60 / 120."""
    assert rank_correlation(np.array([10.0, 20, 30, 40, 50]), np.array([1.0, 4, 2, 2.5, 5]) ** 3) == pytest.approx(1 - 6 * 6 / 120)
    assert rank_correlation(np.array([1.0, 2, 3]), np.array([1.0, 3, 2])) == pytest.approx(0.5)
    assert rank_correlation(np.array([1.0, 2, 3]), -np.array([1.0, 20, 300])) == pytest.approx(-1.0)


def test_ties_get_their_mean_rank() -> None:
    """Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, norms sqrt(4.5) and sqrt(5)."""
    assert rank_correlation(np.array([1.0, 7, 7, 9]), np.array([1.0, 2, 3, 4])) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_against_the_definition() -> None:
    """The rank of a value is the number below it plus half of those equal to it; np.corrcoef of such ranks."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 8, 60).astype(float), draw.integers(0, 8, 60).astype(float)
    ranks = [np.array([(v < one).sum() + ((v == one).sum() + 1) / 2 for one in v]) for v in (x, y)]
    assert rank_correlation(x, y) == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-12)


def test_within_cells_only_the_order_inside_a_cell_counts() -> None:
    """Two cells of two, interleaved, with reversed order inside: -1, though the cells' means rise together; one cell with the right order and one with
    the wrong one: 0; a cell of one adds nothing."""
    x, y, cell = np.array([1.0, 101, 2, 102]), np.array([2.0, 102, 1, 101]), np.array([0, 7, 0, 7])
    assert rank_correlation(x, y) == pytest.approx(0.6)
    assert rank_correlation(x, y, cell) == pytest.approx(-1.0)
    assert rank_correlation(x, np.array([2.0, 101, 1, 102]), cell) == pytest.approx(0.0)
    assert rank_correlation(np.append(x, 5.0), np.append(y, 50.0), np.append(cell, 9)) == pytest.approx(-1.0)
    assert math.isnan(rank_correlation(x, y, np.arange(4)))


def test_ratio_quantiles() -> None:
    """A proxy that is right up to a factor has no spread; ratios 1 to 5 have the median 3; zeros are left out."""
    proxy = np.array([1.0, 2, 3])
    assert ratio_quantiles(7 * proxy, proxy) == pytest.approx([1.0] * 5)
    found = ratio_quantiles(np.array([1.0, 2, 3, 4, 5, 0, 1]), np.array([1.0, 1, 1, 1, 1, 1, 0]))
    assert found == pytest.approx([1.2 / 3, 2 / 3, 1.0, 4 / 3, 4.8 / 3])
    assert all(math.isnan(value) for value in ratio_quantiles(np.zeros(3), proxy))
