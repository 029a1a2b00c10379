"""Rollout correction: the mismatch is put in by hand, and every weight, mask and metric equals its closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from otb_megatron.algorithms import CORRECTIONS, mismatch
from otb_megatron.algorithms.reduce import action_weights

OFFSETS = torch.tensor([0, 2, 2, 5])
LOG_RATIO = [0.5, 0.1, -1.0, 0.0, 2.0]  # responses (0.5, 0.1), (), (-1, 0, 2)


def inputs(log_ratio=LOG_RATIO):
    rollout = torch.linspace(-3, -1, len(log_ratio), dtype=torch.float64)
    return rollout + torch.tensor(log_ratio, dtype=torch.float64), rollout


E = math.exp
CASES = [
    ("truncated", {"clip": 2.0}, [E(0.5), E(0.1), E(-1), 1.0, 2.0], [4], []),
    ("truncated_sequence", {"clip": 2.0}, [E(0.6), E(0.6), 2.0, 2.0, 2.0], [2, 3, 4], []),  # exp(1) = 2.718 is truncated
    ("truncated_geometric", {"clip": 2.0}, [E(0.3), E(0.3), E(1 / 3), E(1 / 3), E(1 / 3)], [], []),
    ("masked", {"low": 0.5, "high": 5.0}, [E(0.5), E(0.1), 0.0, 1.0, 0.0], [], [2, 4]),
    ("masked_sequence", {"low": 0.7, "high": 1.36}, [1, 1, 0, 0, 0], [], [2, 3, 4]),  # exp(0.3) = 1.350, exp(1/3) = 1.396
    ("masked_sequence", {"low": 1.36, "high": 2.0}, [0, 0, 1, 1, 1], [], [0, 1]),
    # k3 of 0.5, 0.1, -1, 0, 2: 0.1487, 0.0052, 0.3679, 0, 4.389
    ("trust_region", {"max_token_kl": 0.2}, [1, 1, 0, 0, 0], [], [2, 3, 4]),
    ("trust_region", {"max_token_kl": 0.1}, [0, 0, 0, 0, 0], [], [0, 1, 2, 3, 4]),
    # of -1 it is 0.3679 and of 2 it is 4.389; of their negatives, the KL the other way, 0.7183 and 1.1353
    ("trust_region", {"max_token_kl": 2.0}, [1, 1, 0, 0, 0], [], [2, 3, 4]),
    ("trust_region", {"max_token_kl": 5.0}, [1, 1, 1, 1, 1], [], []),
]


@pytest.mark.parametrize("name, options, expected, clipped, rejected", CASES)
def test_weights_and_masks(name, options, expected, clipped, rejected):
    log_prob, rollout = inputs()
    actual = CORRECTIONS[name](log_prob.requires_grad_(), rollout, OFFSETS, **options)
    assert actual.weight is not None and not actual.weight.requires_grad
    np.testing.assert_allclose(actual.weight.numpy(), expected, rtol=1e-12)
    assert actual.clipped.nonzero().flatten().tolist() == clipped and actual.rejected.nonzero().flatten().tolist() == rejected


def test_none_corrects_nothing():
    actual = CORRECTIONS["none"](*inputs(), OFFSETS)
    assert actual.weight is None and not actual.clipped.any() and not actual.rejected.any()


def test_extreme_ratios():
    """float32 overflows at exp(89): the truncated weight is the clip, not infinity, and a vanishing one is 0."""
    log_prob, rollout, offsets = torch.tensor([-1.0, -501.0]), torch.tensor([-501.0, -1.0]), torch.tensor([0, 1, 2])
    for name, expected in (("truncated", [2.0, 0.0]), ("truncated_sequence", [2.0, 0.0]), ("masked", [0.0, 0.0]), ("trust_region", [0.0, 0.0])):
        assert CORRECTIONS[name](log_prob, rollout, offsets).weight.tolist() == expected, name


def test_rejected_actions_stay_in_the_denominators():
    """Two of five actions rejected: the weighted loss of a constant 1 is 3/5, not 1."""
    log_prob, rollout = inputs()
    kept = (~CORRECTIONS["masked"](log_prob, rollout, OFFSETS, low=0.5, high=5.0).rejected).float()
    assert float((action_weights(OFFSETS, "token-mean") * kept).sum()) == pytest.approx(0.6)


def test_metrics_docstring_example():
    log_prob = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    rollout = torch.tensor([math.log(0.25), math.log(0.5)], dtype=torch.float64)
    m = mismatch(log_prob, rollout, torch.tensor([0, 1, 2]))
    expected = {
        "kl": 0.0,
        "kl_k3": 0.25,
        "chi2": 1.125,
        "effective_sample_size": 2.5**2 / (2 * 4.25),
        "sequence_effective_sample_size": 2.5**2 / (2 * 4.25),
        "ratio_max": 2.0,
        "probability_difference": 0.25,
    }
    assert {name: float(getattr(m, name)) for name in expected} == pytest.approx(expected, abs=1e-12)


def test_metrics_of_known_noise():
    """log ratios = s z - s^2/2 with z standard normal, 20000 actions of pi_rollout: rho has mean 1, so KL(rollout || trainer) = s^2/2,
    chi2 = exp(s^2) - 1, effective sample size exp(-s^2), and quantiles exp(s z_q - s^2/2)."""
    s = 0.3
    z = torch.from_numpy(np.random.default_rng(0).normal(size=20000))
    rollout = torch.full((20000,), -5.0, dtype=torch.float64)
    m = mismatch(rollout + s * z - s * s / 2, rollout, torch.arange(0, 20001, 100))
    assert float(m.kl) == pytest.approx(s * s / 2, abs=0.007)  # 3 standard errors: 3 * 0.3 / 141
    assert float(m.kl_k3) == pytest.approx(s * s / 2, abs=0.002)
    assert float(m.chi2) == pytest.approx(math.exp(s * s) - 1, abs=0.02)
    assert float(m.effective_sample_size) == pytest.approx(math.exp(-s * s), abs=0.01)
    assert float(m.ratio_p01) == pytest.approx(math.exp(-2.326 * s - s * s / 2), abs=0.01)
    assert float(m.ratio_p50) == pytest.approx(math.exp(-s * s / 2), abs=0.01)
    assert float(m.ratio_p99) == pytest.approx(math.exp(2.326 * s - s * s / 2), abs=0.05)


def test_no_mismatch():
    log_prob, _ = inputs()
    m = mismatch(log_prob, log_prob.clone(), OFFSETS)
    assert float(m.kl) == float(m.kl_k3) == float(m.chi2) == 0.0
    assert float(m.effective_sample_size) == float(m.sequence_effective_sample_size) == 1.0


def test_sequence_effective_sample_size_does_not_overflow():
    """Two responses of 1000 actions with log ratio +-1 each: the products are exp(+-1000); one of the two counts."""
    log_ratio = torch.cat((torch.ones(1000), -torch.ones(1000)))
    m = mismatch(log_ratio - 5, torch.full((2000,), -5.0), torch.tensor([0, 1000, 2000]))
    assert float(m.sequence_effective_sample_size) == pytest.approx(0.5)
