"""Intervals against Student's own numbers and a t interval by hand."""

from __future__ import annotations

import math

import pytest

from otb_megatron.algorithms.jackknife import jackknife, student_quantile


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (15, 2.1314), (30, 2.0423), (1000, 1.9623)])
def test_student_quantile(degrees: int, quantile: float) -> None:
    """The two-sided 95 % column of any table of the t distribution."""
    assert student_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


def test_of_a_mean_it_is_the_t_interval() -> None:
    """1, 2, 3, 4: mean 2.5, standard error sqrt(5/3) / 2 = 0.645497, times t_3 = 3.182446: 2.054260."""
    values = [1.0, 2.0, 3.0, 4.0]
    interval = jackknife(lambda kept: sum(values[i] for i in kept.tolist()) / len(kept), 4)
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.5, 2.5 - 2.054260, 2.5 + 2.054260), abs=1e-4)


def test_of_something_positive_it_is_made_for_the_logarithm() -> None:
    """Two clusters of 1 and 3, statistic their mean: log 2 with left-out values log 3 and log 1; error log(3) / 2, times 12.7062."""
    values = [1.0, 3.0]
    interval = jackknife(lambda kept: sum(values[i] for i in kept.tolist()) / len(kept), 2, positive=True)
    margin = 12.7062 * math.log(3) / 2
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.0, 2 * math.exp(-margin), 2 * math.exp(margin)), rel=1e-3)


def test_what_is_not_determined_is_nan() -> None:
    interval = jackknife(lambda kept: 0.0, 3, positive=True)
    assert all(math.isnan(value) for value in (interval.estimate, interval.low, interval.high))
    interval = jackknife(lambda kept: 1.0 if len(kept) == 3 else math.nan, 3)
    assert interval.estimate == 1.0 and math.isnan(interval.low)
