"""Policy losses: hand-worked values, an independent reading in plain Python, and gradients against finite differences."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from otb_megatron.algorithms import LOSSES
from otb_megatron.algorithms.losses import clipped_surrogate, positive_example_weights, value_loss

E = math.exp


def run(name, log_ratio, advantages, old=None, extra=None, **options):
    """Loss and gradient in log_prob as lists, for log_prob = old + log_ratio in float64, and the metrics."""
    old = torch.tensor(old if old is not None else [-1.0] * len(log_ratio), dtype=torch.float64)
    log_prob = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    terms = LOSSES[name].function(log_prob, old, torch.tensor(advantages, dtype=torch.float64), **(extra or {}), **options)
    assert not any(metric.requires_grad for metric in terms.metrics.values())
    (gradient,) = torch.autograd.grad(terms.loss.sum(), log_prob)
    return terms.loss.tolist(), gradient.tolist(), {k: v.tolist() for k, v in terms.metrics.items()}


LN2 = math.log(2.0)
SELECTED = {"selected": torch.tensor([False, True])}
GSPO_UNCLIPPED = [-E(0.1), -E(0.1), -E(-1)]
HAND_WORKED = [
    # name, log ratios, advantages, extra arguments and options -> loss, gradient
    # r = 2, 1/2 with A = 1: min(2, 1.2) = 1.2 clipped; min(0.5, 0.8) = 0.5. With A = -1: max(2, 1.2) = 2; max(0.5, 0.8) = 0.8 clipped
    ("clipped_surrogate", [LN2, -LN2, LN2, -LN2], [1, 1, -1, -1], {}, [-1.2, -0.5, 2.0, 0.8], [0.0, -0.5, 2.0, 0.0]),
    # clip-higher: the upper bound alone moves
    ("clipped_surrogate", [LN2, -LN2], [1, -1], {"clip_ratio_high": 0.28}, [-1.28, 0.8], [0.0, 0.0]),
    # dual clip 3: r = 4 with A = -2 is bounded by 6; r = 2 is not; A > 0 is not concerned
    ("clipped_surrogate", [2 * LN2, LN2, -LN2], [-2, -2, 1], {"clip_ratio_dual": 3.0}, [6.0, 4.0, -0.5], [0.0, 4.0, -0.5]),
    # sg(clip(2, ., 1.2)) = 1.2; log_prob = -1 + ln 2
    ("cispo", [LN2], [2], {}, [-2.4 * (LN2 - 1)], [-2.4]),
    ("cispo", [-2 * LN2], [2], {}, [-0.5 * (-1 - 2 * LN2)], [-0.5]),  # r = 1/4: no lower bound in effect
    ("cispo", [-2 * LN2], [2], {"clip_ratio_low": 0.5}, [-1.0 * (-1 - 2 * LN2)], [-1.0]),
    ("reinforce", [0.5], [2], {}, [1.0], [-2.0]),
    ("gpg", [0.5], [2], {}, [1.0], [-2.0]),
    ("kl_cov", [0.5, 0.5], [1, 1], {"extra": SELECTED}, [-E(0.5), -E(0.5) + 0.5], [-E(0.5), -E(0.5) + 1]),
    ("kl_cov", [0.5, -0.5], [1, 1], {"extra": SELECTED, "kl_coef": 0.1}, [-E(0.5), -E(-0.5) + 0.05], [-E(0.5), -E(-0.5) - 0.1]),
    ("clip_cov", [0.1, 0.1], [1, 1], {"extra": SELECTED}, [-E(0.1), 0.0], [-E(0.1), 0.0]),
    # r = 2 is clipped at 1.28 where it is not selected, r = 1/2 with A = -1 at 0.7
    ("clip_cov", [LN2, LN2], [1, 1], {"extra": SELECTED, "clip_ratio_high": 0.28}, [-1.28, 0.0], [0.0, 0.0]),
    ("clip_cov", [-LN2, -LN2], [-1, -1], {"extra": SELECTED, "clip_ratio_low": 0.3}, [0.7, 0.0], [0.0, 0.0]),
    ("vapo", [-1.0], [0], {"extra": {"positive": torch.tensor([1.5])}}, [0.3], [-0.15]),
    ("vapo", [LN2], [1], {"extra": {"positive": torch.tensor([0.0])}}, [-1.28], [0.0]),
    ("negative_log_likelihood", [-1.0], [7], {}, [2.0], [-1.0]),
    # one response of log ratios 0.2, 0 and one of -1: s = exp(0.1), exp(-1)
    ("gspo", [0.2, 0, -1], [1, 1, 1], {"extra": {"offsets": torch.tensor([0, 2, 3])}, "clip_ratio_high": 0.2}, GSPO_UNCLIPPED, GSPO_UNCLIPPED),
    # the paper's bounds clip s = exp(0.1) to 1.0004
    ("gspo", [0.2, 0.0], [1, 1], {"extra": {"offsets": torch.tensor([0, 0, 2])}}, [-1.0004] * 2, [0.0, 0.0]),
]


@pytest.mark.parametrize("name, log_ratio, advantages, arguments, loss, gradient", HAND_WORKED)
def test_hand_worked(name, log_ratio, advantages, arguments, loss, gradient):
    actual_loss, actual_gradient, _ = run(name, log_ratio, advantages, **arguments)
    assert actual_loss == pytest.approx(loss, abs=1e-12)
    assert actual_gradient == pytest.approx(gradient, abs=1e-12)


def test_metrics_of_the_clipped_surrogate():
    _, _, metrics = run("clipped_surrogate", [LN2, -LN2, 2 * LN2, 0.1], [1, 1, -2, 1], clip_ratio_dual=3.0)
    assert metrics["clip_fraction"] == [1.0, 0.0, 0.0, 0.0]
    assert metrics["dual_clip_fraction"] == [0.0, 0.0, 1.0, 0.0]
    assert metrics["approx_kl"] == pytest.approx([-LN2, LN2, -2 * LN2, -0.1])


def surrogate_reading(r, a, low, high, dual=None):
    """The definition, one number at a time."""
    loss = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
    return min(loss, -dual * a) if dual is not None and a < 0 else loss


def test_clipped_surrogate_against_its_definition():
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(300, generator=generator, dtype=torch.float64)
    advantages = torch.randn(300, generator=generator, dtype=torch.float64)
    for low, high, dual in ((0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 2.0)):
        terms = clipped_surrogate(log_ratio, torch.zeros(300, dtype=torch.float64), advantages, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_dual=dual)
        expected = [surrogate_reading(E(x), a, low, high, dual) for x, a in zip(log_ratio.tolist(), advantages.tolist(), strict=True)]
        assert terms.loss.tolist() == pytest.approx(expected, abs=1e-12)


def bounded(r, low, high):
    return min(max(r, 1 - low), 1 + high)


# One number at a time: ratio, log-prob, advantage, whether it is selected, weight as a positive example
READINGS = {
    "cispo": lambda r, lp, a, selected, positive: -bounded(r, 1.0, 0.2) * a * lp,
    "clip_cov": lambda r, lp, a, selected, positive: 0.0 if selected else surrogate_reading(r, a, 0.2, 0.2),
    "kl_cov": lambda r, lp, a, selected, positive: -r * a + (abs(math.log(r)) if selected else 0.0),
    "vapo": lambda r, lp, a, selected, positive: surrogate_reading(r, a, 0.2, 0.28) - 0.1 * positive * lp,
}


@pytest.mark.parametrize("name", READINGS)
def test_losses_against_an_independent_reading(name):
    """300 random float64 actions, with the defaults; both bounds are active on many."""
    generator = torch.Generator().manual_seed(4)
    old, advantages = (torch.randn(300, generator=generator, dtype=torch.float64) for _ in range(2))
    log_prob = old + 0.7 * torch.randn(300, generator=generator, dtype=torch.float64)
    extra = {"selected": torch.arange(300) % 3 == 0, "positive": torch.arange(300) % 2 * 1.5}
    actual = LOSSES[name].function(log_prob, old, advantages, **{field: extra[field] for field in LOSSES[name].required}).loss
    columns = (column.tolist() for column in ((log_prob - old).exp(), log_prob, advantages, *extra.values()))
    assert actual.tolist() == pytest.approx([READINGS[name](*row) for row in zip(*columns, strict=True)], abs=1e-12)


def test_gspo_against_an_independent_reading():
    """Sixty random responses of 0 to 8 actions, one after the other in plain Python; some are clipped at either bound and some are not."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(0, 9, size=60).tolist()
    log_ratio = [rng.normal(0, 0.3, n).tolist() for n in lengths]
    advantages = rng.normal(size=60).tolist()
    expected, clipped = [], []
    for of_response, a in zip(log_ratio, advantages, strict=True):
        s = E(sum(of_response) / len(of_response)) if of_response else 1.0
        expected += [surrogate_reading(s, a, 0.1, 0.15)] * len(of_response)
        clipped += [bounded(s, 0.1, 0.15) - s] if surrogate_reading(s, a, 0.1, 0.15) != -s * a else [0.0]
    assert min(clipped) < 0 < max(clipped) and clipped.count(0.0) > 3
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    at_action = np.repeat(advantages, lengths).tolist()
    loss, _, _ = run("gspo", sum(log_ratio, []), at_action, extra={"offsets": offsets}, clip_ratio_low=0.1, clip_ratio_high=0.15)
    assert loss == pytest.approx(expected, abs=1e-12)


def test_value_loss_against_an_independent_reading():
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(300, 3)).tolist()
    expected = [max((v - r) ** 2, (min(max(v, old - 0.5), old + 0.5) - r) ** 2) / 2 for v, old, r in rows]
    assert value_loss(*torch.tensor(rows, dtype=torch.float64).T).loss.tolist() == pytest.approx(expected, abs=1e-12)


STRAIGHT_THROUGH = {"gspo", "cispo"}  # their gradient is not the derivative of their value, by design: see HAND_WORKED


@pytest.mark.parametrize("name", sorted(set(LOSSES) - STRAIGHT_THROUGH))
def test_gradient_is_the_derivative(name):
    """Central differences in float64, away from the corners at the clip bounds and at ratio 1."""
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(40, generator=generator, dtype=torch.float64)
    log_prob = (old + 0.7 * torch.randn(40, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    extra = {"selected": torch.arange(40) % 3 == 0, "positive": torch.arange(40) % 2 * 1.5}
    loss = LOSSES[name]
    arguments = {field: extra[field] for field in loss.required}
    assert torch.autograd.gradcheck(lambda x: loss.function(x, old, advantages, **arguments).loss, log_prob, eps=1e-7, atol=1e-6)


def test_gspo_gradient_under_sequence_mean_is_that_of_the_sequence_ratio():
    """mean over sequences of -min(s A, clip(s) A), with s differentiable, against the per-token form weighted by 1 / length."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 1, 4])
    offsets = torch.tensor([0, 3, 4, 8])
    old = -torch.rand(8, generator=generator, dtype=torch.float64)
    log_prob = (old + 0.01 * torch.randn(8, generator=generator, dtype=torch.float64)).requires_grad_()
    a = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    s = torch.stack([part.mean() for part in (log_prob - old).split(lengths.tolist())]).exp()
    expected = torch.autograd.grad(torch.maximum(-s * a, -s.clamp(1 - 0.003, 1 + 0.004) * a).mean(), log_prob)[0]
    terms = LOSSES["gspo"].function(log_prob, old, a.repeat_interleave(lengths), offsets, clip_ratio_low=0.003, clip_ratio_high=0.004)
    weights = (1 / (3 * lengths)).repeat_interleave(lengths)
    torch.testing.assert_close(torch.autograd.grad((terms.loss * weights).sum(), log_prob)[0], expected)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(name):
    """At log_prob = old_log_prob every policy loss has gradient -A (likelihood losses apart), in float32 and with finite values."""
    log_prob = torch.tensor([-0.5, -2.0, -30.0], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    extra = {"offsets": torch.tensor([0, 2, 3]), "selected": torch.zeros(3, dtype=torch.bool), "positive": torch.zeros(3)}
    loss = LOSSES[name]
    terms = loss.function(log_prob, log_prob.detach(), advantages, **{field: extra[field] for field in loss.required})
    expected = -torch.ones(3) if name == "negative_log_likelihood" else -advantages
    assert torch.autograd.grad(terms.loss.sum(), log_prob)[0].tolist() == pytest.approx(expected.tolist())
    assert terms.loss.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"negative_log_likelihood"}))
def test_extreme_ratios_stay_finite(name):
    """log ratios of +-200, beyond float32's exponent range."""
    log_prob = torch.tensor([-1.0, -201.0, -1.0, -201.0], requires_grad=True)
    old = torch.tensor([-201.0, -1.0, -201.0, -1.0])
    extra = {"offsets": torch.tensor([0, 1, 2, 3, 4]), "selected": torch.zeros(4, dtype=torch.bool), "positive": torch.zeros(4)}
    loss = LOSSES[name]
    terms = loss.function(log_prob, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), **{field: extra[field] for field in loss.required})
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all() and torch.isfinite(log_prob.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_no_action_at_all(name):
    """A filler microbatch: an empty loss that can be differentiated."""
    empty = torch.zeros(0, requires_grad=True)
    extra = {"offsets": torch.tensor([0]), "selected": torch.zeros(0, dtype=torch.bool), "positive": torch.zeros(0)}
    loss = LOSSES[name]
    terms = loss.function(empty, torch.zeros(0), torch.zeros(0), **{field: extra[field] for field in loss.required})
    terms.loss.sum().backward()
    assert terms.loss.shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_required_is_what_the_function_takes_besides(name):
    parameters = inspect.signature(LOSSES[name].function).parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    assert positional[:3] == ["log_prob", "old_log_prob", "advantages"]
    assert LOSSES[name].required == set(positional[3:])


def test_value_loss():
    """V, V_old, R: (2, 1, 1.8): max(0.2^2, (1.5 - 1.8)^2) / 2 = 0.045, no gradient; (1.2, 1, 1.8): 0.36 / 2 = 0.18, gradient V - R = -0.6."""
    values = torch.tensor([2.0, 1.2], dtype=torch.float64, requires_grad=True)
    terms = value_loss(values, torch.tensor([1.0, 1.0], dtype=torch.float64), torch.tensor([1.8, 1.8], dtype=torch.float64), clip=0.5)
    terms.loss.sum().backward()
    assert terms.loss.tolist() == pytest.approx([0.045, 0.18])
    assert values.grad.tolist() == pytest.approx([0.0, -0.6])
    assert terms.metrics["clip_fraction"].tolist() == [1.0, 0.0]


def test_value_loss_gradient_is_the_derivative():
    """Central differences in float64, with values on both sides of the bound."""
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(60, generator=generator, dtype=torch.float64)
    values = (old + torch.randn(60, generator=generator, dtype=torch.float64)).requires_grad_()
    targets = torch.randn(60, generator=generator, dtype=torch.float64)
    assert 10 < int(value_loss(values, old, targets).metrics["clip_fraction"].sum()) < 50
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, targets).loss, values, eps=1e-7, atol=1e-6)


def test_positive_example_weights():
    """Lengths 1 and 3, the second positive: 4 actions, 3 of them positive. None positive: all zero, no NaN."""
    offsets = torch.tensor([0, 1, 4])
    assert positive_example_weights(torch.tensor([False, True]), offsets).tolist() == pytest.approx([0.0, 4 / 3, 4 / 3, 4 / 3])
    assert positive_example_weights(torch.tensor([False, False]), offsets).tolist() == [0.0] * 4
