"""Advantages from discounted returns and a critic's values, without prompt groups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otb_megatron.algorithms.options import Fraction, Positive
from otb_megatron.algorithms.ragged import discounted_suffix_sums, whiten


def reinforce_plus_plus(rewards: Tensor, offsets: Tensor, *, discount: Fraction = 1.0) -> Tensor:
    """REINFORCE++ (arXiv 2501.03262): whitened returns.

        A_t = whiten(G_t)          G_t = sum_{k >= t} discount^(k - t) r_k, mean and variance over all actions of the batch

    Example: two responses of one action with rewards 1 and 0: mean 0.5, variance 0.5, advantages +-0.70711.

    Args:
        rewards: [actions], each at the action that it was paid for.
        offsets: [samples + 1], where each sample starts in the [actions] arrays.

    Returns:
        [actions], the dtype of `rewards`.
    """
    return whiten(discounted_suffix_sums(rewards.double(), offsets, discount)).to(rewards.dtype)


def gae(rewards: Tensor, offsets: Tensor, values: Tensor, *, discount: Fraction = 1.0, lam: Fraction = 1.0, whitened: bool = True) -> Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16).

        A_t = sum_{k >= 0} (discount lam)^k delta_{t+k}          delta_t = r_t + discount V_{t+1} - V_t

    V after the last action is 0: a truncated response counts as ended, as in verl. `whitened` is verl's, over the batch.

    Example: rewards (0, 1), values (0.5, 0.8), discount 1, lam 0.5, not whitened: delta = (0.3, 0.2), A = (0.4, 0.2).

    Args:
        rewards: [actions], each at the action that it was paid for.
        offsets: [samples + 1], where each sample starts in the [actions] arrays.
        values: [actions], the critic's estimate of the return before the action.

    Returns:
        [actions], the dtype of `rewards`.
    """
    advantages = _generalized(rewards, offsets, values, discount, lam)
    return (whiten(advantages) if whitened else advantages).to(rewards.dtype)


def gae_length_adaptive(rewards: Tensor, offsets: Tensor, values: Tensor, *, discount: Fraction = 1.0, alpha: Positive = 0.05, whitened: bool = True) -> Tensor:
    """VAPO's GAE (arXiv 2504.05118): lam grows with the response's length l, lam = 1 - 1 / (alpha l).

    lam is 0 up to a length of 1 / alpha. VAPO decouples the critic's lam (1) from this one: train it on
    `value_targets(..., lam=1.0)`.

    Example: alpha 0.05 and l = 40 give lam = 0.5.

    Arguments and result are those of `gae`.
    """
    lam = (1 - 1 / (alpha * offsets.diff().double())).clamp(min=0.0)
    advantages = _generalized(rewards, offsets, values, discount, lam)
    return (whiten(advantages) if whitened else advantages).to(rewards.dtype)


def value_targets(rewards: Tensor, offsets: Tensor, values: Tensor, *, discount: Fraction = 1.0, lam: Fraction = 1.0) -> Tensor:
    """What the critic learns: V_t + A_t of `gae` before whitening; the discounted return for lam = 1.

    Example: rewards (0, 1), values (0.5, 0.8), discount 1: (1, 1) for lam 1, (0.9, 1) for lam 0.5.

    Arguments and result are those of `gae`.
    """
    return (_generalized(rewards, offsets, values, discount, lam) + values.double()).to(rewards.dtype)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant, below for worse; NaN where all returns are equal.

    Example: returns (0, 1, 2), values (0, 1, 1): the errors (0, 0, 1) have variance 2/9, the returns 2/3: 2/3.

    Args:
        values, returns: [actions].
    """
    returns = returns.double()
    variance = returns.var(correction=0)
    return float(1 - (returns - values.double()).var(correction=0) / variance) if variance > 0 else math.nan


def _generalized(rewards: Tensor, offsets: Tensor, values: Tensor, discount: float, lam: float | Tensor) -> Tensor:
    values = values.double()
    following = torch.zeros_like(values)
    following[:-1] = values[1:]
    following[offsets[1:][offsets.diff() > 0] - 1] = 0.0
    return discounted_suffix_sums(rewards.double() + discount * following - values, offsets, discount * lam)
