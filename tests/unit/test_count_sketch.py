"""Inner products of sketches: their mean and variance over seeds against the formulas, and exactness where nothing is lost."""

from __future__ import annotations

import pytest
import torch

from otb_megatron.ops.count_sketch import CountSketch

CPU = torch.device("cpu")


def test_inner_products_are_unbiased_with_the_stated_variance() -> None:
    """2000 sketches of 60 coordinates in 16 places: the mean of <Sx, Sy> within four standard errors of <x, y>, the variance within 15 % of the formula's."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 60, generator=generator) + 0.5
    found = []
    for seed in range(2000):
        sketch = CountSketch(60, 16, seed=seed, device=CPU)
        found.append(float(sketch(x) @ sketch(y)))
    products = torch.tensor(found, dtype=torch.float64)
    expected = float((x.square().sum() * y.square().sum() + (x @ y).square() - 2 * (x.square() * y.square()).sum()) / 16)
    assert abs(products.mean() - x @ y) < 4 * (expected / 2000) ** 0.5
    assert products.var() == pytest.approx(expected, rel=0.15)


def test_the_same_seed_gives_the_same_linear_map() -> None:
    x, y = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    one, again, other = (CountSketch(1000, 64, seed=seed, device=CPU) for seed in (3, 3, 4))
    torch.testing.assert_close(one(2 * x - y), 2 * again(x) - again(y))
    assert (one(x) - other(x)).abs().max() > 0.1
    assert one(x).shape == (64,) and one.relative_error == pytest.approx((2 / 64) ** 0.5)


def test_a_short_vector_is_kept_whole() -> None:
    x = torch.randn(50, generator=torch.Generator().manual_seed(1))
    sketch = CountSketch(50, 50, seed=0, device=CPU)
    kept = sketch(x)
    assert torch.equal(kept, x) and kept.data_ptr() != x.data_ptr()
    assert sketch.is_exact and sketch.relative_error == 0.0 and sketch.size == 50
