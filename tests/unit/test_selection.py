"""DAPO's dynamic sampling and overlong punishment, SimpleTIR's void turns, and the selections of the covariance losses."""

from __future__ import annotations

import pytest
import torch

from otb_megatron.algorithms.covariance import clip_cov_selection, kl_cov_selection, token_covariance
from otb_megatron.algorithms.selection import groups_with_signal, soft_overlong_punishment, without_void_turns


def test_groups_with_signal():
    """Interleaved groups 5: (1, 0) has signal; 2: (1, 1), 7: (0.1 twice but for rounding), 1: one member, 3: (-1, -2),
    8: (100, 100 + one float32 step of 7.6e-6)."""
    outcome = torch.tensor([1.0, 1.0, 0.1, 0.0, 1.0, 0.1 * 3 / 3 + 1e-8, 4.0, -1.0, -2.0, 100.0, 100.00001])
    group = torch.tensor([5, 2, 7, 5, 2, 7, 1, 3, 3, 8, 8])
    assert groups_with_signal(outcome, group).tolist() == [True, False, False, True, False, False, False, True, True, False, False]


def test_soft_overlong_punishment():
    actual = soft_overlong_punishment(torch.tensor([10, 80, 90, 100, 120]), max_tokens=100, buffer_tokens=20)
    assert actual.tolist() == pytest.approx([0.0, 0.0, -0.5, -1.0, -1.0])


def test_without_void_turns():
    """Turns (ok, void), (ok), (), (void)."""
    kept = without_void_turns(torch.tensor([False, True, False, True]), torch.tensor([0, 2, 3, 3, 4]))
    assert kept.tolist() == [False, True, True, False]


def test_token_covariance():
    """A = (1, 0, -1) and log_prob = (-1, -2, -3), both centred: (1, 0, -1)^2; its mean is the population covariance."""
    actual = token_covariance(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 0.0, -1.0]))
    assert actual.tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_kl_cov_takes_the_largest():
    log_prob, advantages = torch.tensor([0.0, -1.0, -2.0, -9.0]), torch.tensor([2.0, 0.0, 0.0, -2.0])  # cov (6, 0, 0, 12)
    assert kl_cov_selection(log_prob, advantages, torch.Generator(), selected_fraction=0.5).tolist() == [True, False, False, True]
    assert kl_cov_selection(log_prob, advantages, torch.Generator(), selected_fraction=1e-9).tolist() == [False, False, False, True]  # at least one
    assert kl_cov_selection(torch.zeros(0), torch.zeros(0), torch.Generator()).shape == (0,)


def test_clip_cov_draws_within_the_bounds():
    """cov (6, 0, 0, 12): one lies in (1, 10). With 1000 tokens of equal covariance, fraction 0.1 draws 100, another 100 for another seed."""
    log_prob, advantages = torch.tensor([0.0, -1.0, -2.0, -9.0]), torch.tensor([2.0, 0.0, 0.0, -2.0])
    within = clip_cov_selection(log_prob, advantages, torch.Generator(), selected_fraction=1.0, covariance_low=1.0, covariance_high=10.0)
    assert within.tolist() == [True, False, False, False]
    assert not clip_cov_selection(log_prob, advantages, torch.Generator(), covariance_low=20.0, covariance_high=30.0).any()
    sign = torch.tensor([1.0, -1.0]).repeat(500)
    draws = [clip_cov_selection(2 * sign, sign, torch.Generator().manual_seed(seed), selected_fraction=0.1) for seed in (0, 1, 0)]
    assert [int(draw.sum()) for draw in draws] == [100, 100, 100]
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])
