"""Rollout correction: the mismatch is put in by hand, and every weight, mask and metric equals its closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from otb_megatron.algorithms import corrections, mismatch, truncated_importance_weights
from otb_megatron.algorithms.reduce import action_weights

OFFSETS = torch.tensor([0, 2, 2, 5])
LOG_RATIO = [0.5, 0.1, -1.0, 0.0, 2.0]  # responses (0.5, 0.1), (), (-1, 0, 2)


def inputs(log_ratio=LOG_RATIO):
    rollout = torch.linspace(-3, -1, len(log_ratio), dtype=torch.float64)
    return rollout + torch.tensor(log_ratio, dtype=torch.float64), rollout


E = math.exp
CASES = [
    ("truncated_importance_weights", (2.0,), False, [E(0.5), E(0.1), E(-1), 1.0, 2.0]),
    ("sequence_importance_weights", (2.0,), True, [E(0.6), E(0.6), 2.0, 2.0, 2.0]),  # exp(1) = 2.718 is truncated
    ("geometric_importance_weights", (2.0,), True, [E(0.3), E(0.3), E(1 / 3), E(1 / 3), E(1 / 3)]),
    ("masked_importance_weights", (0.5, 5.0), False, [E(0.5), E(0.1), 0.0, 1.0, 0.0]),
    ("geometric_sequence_mask", (0.7, 1.36), True, [1, 1, 0, 0, 0]),  # exp(0.3) = 1.350, exp(1/3) = 1.396
    # k3 of 0.5, 0.1, -1, 0, 2: 0.1487, 0.0052, 0.3679, 0, 4.389
    ("trust_region_mask", (0.2,), True, [1, 1, 0, 0, 0]),
    ("trust_region_mask", (0.1,), True, [0, 0, 0, 0, 0]),
    ("trust_region_mask", (5.0,), True, [1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize("name, bounds, by_sequence, expected", CASES)
def test_weights_and_masks(name, bounds, by_sequence, expected):
    log_prob, rollout = inputs()
    arguments = (OFFSETS, *bounds) if by_sequence else bounds
    actual = getattr(corrections, name)(log_prob.requires_grad_(), rollout, *arguments)
    assert not actual.requires_grad
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)


def test_extreme_ratios():
    """float32 overflows at exp(89): the truncated weight is the clip, not infinity, and a vanishing one is 0."""
    log_prob, rollout = torch.tensor([-1.0, -501.0]), torch.tensor([-501.0, -1.0])
    assert truncated_importance_weights(log_prob, rollout, 2.0).tolist() == [2.0, 0.0]
    assert corrections.sequence_importance_weights(log_prob, rollout, torch.tensor([0, 1, 2]), 2.0).tolist() == [2.0, 0.0]
    assert corrections.masked_importance_weights(log_prob, rollout, 0.5, 5.0).tolist() == [0.0, 0.0]
    assert corrections.trust_region_mask(log_prob, rollout, torch.tensor([0, 1, 2]), 1.0).tolist() == [0.0, 0.0]


def test_rejected_actions_stay_in_the_denominators():
    """Two of five actions rejected: the weighted loss of a constant 1 is 3/5, not 1."""
    log_prob, rollout = inputs()
    kept = (corrections.masked_importance_weights(log_prob, rollout, 0.5, 5.0) > 0).float()
    assert float((action_weights(OFFSETS, "token-mean") * kept).sum()) == pytest.approx(0.6)


def test_metrics_docstring_example():
    log_prob = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    rollout = torch.tensor([math.log(0.25), math.log(0.5)], dtype=torch.float64)
    m = mismatch(log_prob, rollout, torch.tensor([0, 1, 2]), clip=1.5)
    expected = {
        "kl": 0.0,
        "kl_k3": 0.25,
        "chi2": 1.125,
        "effective_sample_size": 2.5**2 / (2 * 4.25),
        "sequence_effective_sample_size": 2.5**2 / (2 * 4.25),
        "clipped_fraction": 0.5,
        "ratio_max": 2.0,
        "probability_difference": 0.25,
    }
    assert {name: float(getattr(m, name)) for name in expected} == pytest.approx(expected, abs=1e-12)


def test_metrics_of_known_noise():
    """log ratios = s z - s^2/2 with z standard normal, 20000 actions of pi_rollout: rho has mean 1, so KL(rollout || trainer) = s^2/2,
    chi2 = exp(s^2) - 1, effective sample size exp(-s^2), quantiles exp(s z_q - s^2/2), and P(rho > clip) by the normal tail."""
    s = 0.3
    z = torch.from_numpy(np.random.default_rng(0).normal(size=20000))
    rollout = torch.full((20000,), -5.0, dtype=torch.float64)
    m = mismatch(rollout + s * z - s * s / 2, rollout, torch.arange(0, 20001, 100), clip=2.0)
    assert float(m.kl) == pytest.approx(s * s / 2, abs=0.007)  # 3 standard errors: 3 * 0.3 / 141
    assert float(m.kl_k3) == pytest.approx(s * s / 2, abs=0.002)
    assert float(m.chi2) == pytest.approx(math.exp(s * s) - 1, abs=0.02)
    assert float(m.effective_sample_size) == pytest.approx(math.exp(-s * s), abs=0.01)
    assert float(m.ratio_p01) == pytest.approx(math.exp(-2.326 * s - s * s / 2), abs=0.01)
    assert float(m.ratio_p50) == pytest.approx(math.exp(-s * s / 2), abs=0.01)
    assert float(m.ratio_p99) == pytest.approx(math.exp(2.326 * s - s * s / 2), abs=0.05)
    assert float(m.clipped_fraction) == pytest.approx(0.5 * math.erfc((math.log(2) + s * s / 2) / s / math.sqrt(2)), abs=0.002)


def test_no_mismatch():
    log_prob, _ = inputs()
    m = mismatch(log_prob, log_prob.clone(), OFFSETS, clip=2.0)
    assert float(m.kl) == float(m.kl_k3) == float(m.chi2) == float(m.clipped_fraction) == 0.0
    assert float(m.effective_sample_size) == float(m.sequence_effective_sample_size) == 1.0


def test_sequence_effective_sample_size_does_not_overflow():
    """Two responses of 1000 actions with log ratio +-1 each: the products are exp(+-1000); one of the two counts."""
    log_ratio = torch.cat((torch.ones(1000), -torch.ones(1000)))
    m = mismatch(log_ratio - 5, torch.full((2000,), -5.0), torch.tensor([0, 1000, 2000]), clip=2.0)
    assert float(m.sequence_effective_sample_size) == pytest.approx(0.5)
