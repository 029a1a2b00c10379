"""KL estimates: values by hand, and the gradient that each one means, checked by enumerating a small distribution."""

from __future__ import annotations

import math

import pytest
import torch

from otb_megatron.algorithms import kl_estimate
from otb_megatron.algorithms.kl import AdaptiveKL, reward_kl

KINDS = ("k1", "k2", "k3")


@pytest.mark.parametrize(
    "kind, value, gradient",
    [("k1", 0.5, 0.5), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_docstring_example(kind, value, gradient):
    log_prob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(log_prob, torch.tensor([-1.5], dtype=torch.float64), kind)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-12)
    assert log_prob.grad.item() == pytest.approx(gradient, abs=1e-12)


def distributions():
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    return theta, torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_value(kind):
    """Over actions from pi, k1 and k3 have mean KL(pi || ref). k2 has not: near the reference it differs in third order."""
    theta, reference = distributions()
    log_pi = theta.detach().log_softmax(0)
    kl = float((log_pi.exp() * (log_pi - reference)).sum())
    mean = float((log_pi.exp() * kl_estimate(log_pi, reference, kind)).sum())
    if kind == "k2":
        near = (reference + 0.01 * (log_pi - reference)).log_softmax(0)
        kl = float((near.exp() * (near - reference)).sum())
        mean = float((near.exp() * kl_estimate(near, reference, kind)).sum())
        assert mean == pytest.approx(kl, rel=2e-2) and mean != pytest.approx(kl, rel=1e-6)
    else:
        assert mean == pytest.approx(kl, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_gradient(kind):
    """The mean over actions from pi of each estimate's gradient: that of KL(pi || ref) for k1 and k2, of KL(ref || pi) for k3."""
    theta, reference = distributions()
    log_pi = theta.log_softmax(0)
    estimate = kl_estimate(log_pi, reference, kind)
    actual = torch.autograd.grad((log_pi.detach().exp() * estimate).sum(), theta, retain_graph=True)[0]
    reverse = (log_pi.exp() * (log_pi - reference)).sum()
    forward = (reference.exp() * (reference - log_pi)).sum()
    expected = torch.autograd.grad(forward if kind == "k3" else reverse, theta)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_plain_k1_would_be_no_penalty():
    """Why k1's gradient is replaced: E[grad log pi] = 0."""
    theta, reference = distributions()
    log_pi = theta.log_softmax(0)
    plain = torch.autograd.grad((log_pi.detach().exp() * (log_pi - reference)).sum(), theta)[0]
    assert plain.abs().max() < 1e-15


@pytest.mark.parametrize("kind", KINDS)
def test_finite_far_from_the_reference(kind):
    log_prob = torch.tensor([-500.0, -1e-3], requires_grad=True)
    estimate = kl_estimate(log_prob, torch.tensor([-1e-3, -500.0]), kind)
    estimate.sum().backward()
    assert torch.isfinite(estimate).all() and torch.isfinite(log_prob.grad).all()


@pytest.mark.parametrize("kind, expected", [("k1", [0.95, 0.05]), ("abs", [0.95, -0.05]), ("k2", [0.9875, -0.0125])])
def test_kl_in_the_reward(kind, expected):
    """Rewards 1 and 0, d = 0.5 and -0.5, coefficient 0.1."""
    actual = torch.tensor([1.0, 0.0]) - 0.1 * reward_kl(torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.5, -0.5]), kind)
    assert actual.tolist() == pytest.approx(expected) and not actual.requires_grad


def test_adaptive_controller():
    """coef 0.1, target 0.05, horizon 1000, 100 samples: kl 0.1 is 100 % above, clipped to 20 %: 0.1 (1 + 0.02); kl 0.045 is 10 % below: 0.099.

    6000 samples move it as far as 1000: 0.1 (1 - 0.2) and 0.1 (1 + 0.2), not 0.1 (1 - 1.2), which is negative.
    """
    controller = AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
    assert controller.updated(0.1, 100).coef == pytest.approx(0.102)
    assert controller.updated(0.045, 100).coef == pytest.approx(0.099)
    assert controller.updated(0.0, 100).coef == pytest.approx(0.098)
    assert controller.updated(0.0, 6000).coef == pytest.approx(0.08)
    assert controller.updated(0.1, 6000).coef == pytest.approx(0.12)
