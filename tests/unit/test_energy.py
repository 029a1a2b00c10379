"""The energy of an action against its definition in float64, and the check that statistics belong to a distribution."""

from __future__ import annotations

import warnings

import pytest
import torch

from otb_megatron.algorithms import energy
from otb_megatron.types import PolicyStatistics


def statistics(logits: torch.Tensor, action: int) -> PolicyStatistics:
    """float64 log-probs and rests of one action per row, rounded to float32 as the statistics head gives them."""
    log_pi = logits.double().log_softmax(-1)
    others = torch.cat((log_pi[:, :action], log_pi[:, action + 1 :]), dim=1)
    return PolicyStatistics(log_pi[:, action].float(), torch.zeros(len(logits)), others.exp().square().sum(-1).float())


def test_docstring_example():
    w = energy(PolicyStatistics(torch.tensor([0.5]).log(), torch.zeros(1), torch.tensor([0.13])))
    assert float(w) == pytest.approx(0.38, abs=1e-7)


def test_is_the_squared_distance_to_the_one_hot_vector():
    """||e_y - pi||^2 in float64 over 1000 random distributions, which is also the squared gradient of log pi(y) in the logits."""
    logits = 4 * torch.randn(1000, 17, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (torch.eye(17, dtype=torch.float64)[3] - logits.softmax(-1)).square().sum(-1)
    torch.testing.assert_close(energy(statistics(logits, 3)).double(), expected, rtol=2e-6, atol=0)
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(logits.log_softmax(-1)[:, 3].sum(), logits)
    torch.testing.assert_close(gradient.square().sum(-1), expected)


@pytest.mark.parametrize("exponent", range(1, 8))
def test_near_deterministic_tokens(exponent):
    """1 - pi = 10^-exponent, spread evenly over 4 others: w = 1.25 (1 - pi)^2 to 1e-6, where 1 - 2 pi + sum pi^2 is 0 in float32 from 1e-4 on."""
    one_minus_pi = torch.tensor([10.0**-exponent], dtype=torch.float64)
    given = PolicyStatistics(torch.log1p(-one_minus_pi).float(), torch.zeros(1), (4 * (one_minus_pi / 4).square()).float())
    torch.testing.assert_close(energy(given).double(), 1.25 * one_minus_pi.square(), rtol=1e-6, atol=0)


def test_bounds_and_silence_on_true_statistics():
    """(1 - pi)^2 (1 + 1 / (V - 1)) <= w <= 2 (1 - pi)^2 for V = 9, from flat to nearly deterministic; and no warning."""
    scale = 10 ** torch.linspace(-2, 1.5, 4000, dtype=torch.float64)[:, None]
    logits = scale * torch.randn(4000, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    given = statistics(logits, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w = energy(given).double()
    one_minus_pi = -torch.expm1(given.log_prob.double())
    assert (w <= 2 * one_minus_pi.square() * (1 + 1e-5) + 1e-12).all()
    assert (w >= one_minus_pi.square() * (1 + 1 / 8) * (1 - 1e-5) - 1e-12).all()


@pytest.mark.parametrize(
    "log_prob, rest",
    [(-0.1, 0.02), (-0.1, -1e-3), (0.01, 0.0), (float("nan"), 0.1), (-0.1, float("nan"))],
    ids=["more than all the remaining mass", "negative", "probability above 1", "nan log-prob", "nan rest"],
)
def test_impossible_statistics_are_pointed_at(log_prob, rest):
    """The remaining mass at log-prob -0.1 is 0.0952, so rest is at most 0.00906. Action 2 of 4 is wrong."""
    log_probs, rests = torch.full((4,), -0.1), torch.full((4,), 0.005)
    log_probs[2], rests[2] = log_prob, rest
    with pytest.warns(RuntimeWarning, match=r"action 2: .* 1 of 4 checked actions"):
        energy(PolicyStatistics(log_probs, torch.zeros(4), rests))


def test_the_check_is_sampled():
    """A million actions, all wrong from 300000 on: found, by looking at 62500 of them."""
    rests = torch.full((1_000_000,), 0.005)
    rests[300_000:] = 1.0
    with pytest.warns(RuntimeWarning, match=r"action 300000: .* 43750 of 62500 checked actions"):
        energy(PolicyStatistics(torch.full((1_000_000,), -0.1), torch.zeros(1), rests))
