"""Variance proxies and energy profiles, worked by hand."""

from __future__ import annotations

import pytest
import torch

from otb_megatron.algorithms.variance import energy_by_correctness, energy_by_position, energy_by_probability, variance_proxies


def scalars(record) -> dict[str, float]:
    return {name: float(value) for name, value in vars(record).items()}


def test_docstring_example():
    actual = variance_proxies(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 1.5]), torch.tensor([0, 2]))
    assert scalars(actual) == {"token": 1.0, "trajectory": 0.0, "advantage_squared": 0.0, "energy": 2.0}


def test_two_responses_with_correction():
    """Lengths 2, 0, 1. A = (1, 3), (-2); w = (0.5, 1), (2); rho = (2, 1), (0.5).

    token = (4 * 1 * 0.5 + 9 * 1 + 0.25 * 4 * 2) / 3 = 13 / 3. Means: A = 2, -2; rho = 1.5, 0.5; W = 1.5, 2;
    trajectory = (2.25 * 4 * 1.5 + 0.25 * 4 * 2) / 2 = 7.75; energy = ((4 * 0.5 + 1) + 0.25 * 2) / 2 = 1.75.
    """
    actual = variance_proxies(torch.tensor([1.0, 3.0, -2.0]), torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 2, 2, 3]), torch.tensor([2.0, 1.0, 0.5]))
    assert scalars(actual) == pytest.approx({"token": 13 / 3, "trajectory": 7.75, "advantage_squared": 4.0, "energy": 1.75})


def test_profiles():
    energy, offsets = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 3, 4])
    position = energy_by_position(energy, offsets, bin_width=2)
    assert position.mean.tolist() == pytest.approx([8 / 3, 3.0]) and position.count.tolist() == [3, 1]
    correctness = energy_by_correctness(energy, offsets, torch.tensor([True, False]))
    assert correctness.mean.tolist() == [5.0, 2.0] and correctness.count.tolist() == [1, 3]
    probability = energy_by_probability(torch.tensor([1.5, 0.4, 0.02]), torch.tensor([0.1, 0.6, 0.9]).log(), torch.tensor([0.5, 0.8, 0.95]))
    assert probability.mean[:3].tolist() == pytest.approx([1.5, 0.4, 0.02]) and probability.count.tolist() == [1, 1, 1, 0]
    assert probability.mean[3].isnan()
