"""Confidence intervals of any statistic of independent clusters, such as prompts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; NaN where the data do not determine it."""

    estimate: float
    low: float
    high: float


def jackknife(statistic: Callable[[Tensor], float], num_clusters: int, *, positive: bool = False) -> Interval:
    """The delete-one-cluster jackknife with Student's t.

        theta +- t_{C-1} sqrt((C - 1) / C sum_c (theta_{-c} - mean theta_{-c})^2)        (Efron and Stein 1981)

    For a mean over clusters this is the t interval. Whatever varies between clusters, and within them, is in it, because clusters
    are independent; drawing more groups from the same responses does not shrink it.

    Args:
        statistic: of the clusters given by int64 [kept]; NaN if they do not determine it.
        num_clusters: C, at least 2.
        positive: the statistic is a variance or a ratio of such: the interval is made for its logarithm, so it never reaches 0.
    """
    everyone = torch.arange(num_clusters)
    values = np.array([statistic(everyone)] + [statistic(everyone[everyone != left_out]) for left_out in range(num_clusters)], dtype=np.float64)
    if positive:
        values = np.log(values, out=np.full_like(values, np.nan), where=values > 0)
    estimate, left_out = values[0], values[1:]
    error = math.sqrt((num_clusters - 1) * np.mean((left_out - left_out.mean()) ** 2))
    margin = student_quantile(num_clusters - 1) * error
    bounds = (estimate, estimate - margin, estimate + margin)
    return Interval(*(float(np.exp(bound)) if positive else float(bound) for bound in bounds))


def student_quantile(degrees_of_freedom: int) -> float:
    """The 97.5 % point of Student's t, by integrating its density: 12.706, 4.303, 3.182, ... 1.960."""
    t = np.linspace(0.0, 20.0, 200_001)
    log_scale = math.lgamma((degrees_of_freedom + 1) / 2) - math.lgamma(degrees_of_freedom / 2) - 0.5 * math.log(degrees_of_freedom * math.pi)
    density = np.exp(log_scale - (degrees_of_freedom + 1) / 2 * np.log1p(t**2 / degrees_of_freedom))
    below = 0.5 + np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(t))))
    return float(np.interp((1 + LEVEL) / 2, below, t))
