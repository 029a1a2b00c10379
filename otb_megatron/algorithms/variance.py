"""How noisy the gradient is, as far as the forward pass can tell: energies and advantages, before any backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otb_megatron.algorithms.ragged import sample_of_action, sums


@dataclass(frozen=True)
class VarianceProxies:
    """Scalars, float64. Energies are squared norms in logit space: compare estimators by them, not with a gradient's norm."""

    token: Tensor  # mean over actions of (rho A w^(1/2))^2: the size of one token's gradient term
    trajectory: Tensor  # mean over responses of (mean rho)^2 (mean A)^2 W: verl's total power
    advantage_squared: Tensor  # mean over responses of (mean A)^2: verl's expected_a_squared
    energy: Tensor  # mean over responses of W = sum rho^2 w: verl's expected_w


def variance_proxies(advantages: Tensor, energy: Tensor, offsets: Tensor, correction: Tensor | None = None) -> VarianceProxies:
    """The token-level proxy, and verl's trajectory-level ones to compare with.

    The trajectory-level form takes a response's mean advantage, which for token-level advantages is not what its gradient is
    made of: an estimator whose advantages change sign within a response looks better by it than it is.

    Example: one response, A = (1, -1), w = (0.5, 1.5), rho = 1: token 1, trajectory 0, advantage_squared 0, energy 2.

    Args:
        advantages: [actions].
        energy: [actions], w.
        offsets: [samples + 1]; at least one sample with actions.
        correction: [actions], rho; None for 1.
    """
    advantages, energy = advantages.double(), energy.double()
    rho = torch.ones_like(energy) if correction is None else correction.double()
    length = offsets.diff()
    alive = length > 0
    mean_advantage, mean_rho = (sums(x, offsets)[alive] / length[alive] for x in (advantages, rho))
    return VarianceProxies(
        token=(rho.square() * advantages.square() * energy).mean(),
        trajectory=(mean_rho.square() * mean_advantage.square() * sums(energy, offsets)[alive]).mean(),
        advantage_squared=mean_advantage.square().mean(),
        energy=sums(rho.square() * energy, offsets)[alive].mean(),
    )


@dataclass(frozen=True)
class Profile:
    """Means of a per-action quantity over bins, and how many actions each holds."""

    mean: Tensor  # float64 [bins], NaN for an empty bin
    count: Tensor  # int64 [bins]


def energy_by_position(energy: Tensor, offsets: Tensor, bin_width: int) -> Profile:
    """Mean energy of the actions at steps [0, bin_width), [bin_width, 2 bin_width), ...

    Example: energies (1, 2, 3) and (5,), width 2: means (8/3, 3), counts (3, 1).

    Args:
        energy: [actions].
        offsets: [samples + 1].
        bin_width: steps per bin.
    """
    step = torch.arange(energy.numel(), device=energy.device) - offsets[sample_of_action(offsets)]
    longest = int(offsets.diff().max())
    return _profile(energy, step // bin_width, -(-longest // bin_width))


def energy_by_probability(energy: Tensor, log_prob: Tensor, bounds: Tensor) -> Profile:
    """Mean energy of the actions whose probability lies below bounds[0], in [bounds[0], bounds[1]), ..., from bounds[-1] up.

    Example: probabilities 0.1, 0.6, 0.9 with energies 1.5, 0.4, 0.02 and bounds (0.5, 0.8): means (1.5, 0.4, 0.02).

    Args:
        energy: [actions].
        log_prob: [actions].
        bounds: [bins - 1], rising probabilities.
    """
    return _profile(energy, torch.bucketize(log_prob.double().exp(), bounds.double(), right=True), bounds.numel() + 1)


def energy_by_correctness(energy: Tensor, offsets: Tensor, correct: Tensor) -> Profile:
    """Mean energy of the actions of wrong (first bin) and right (second bin) responses.

    Args:
        energy: [actions].
        offsets: [samples + 1].
        correct: bool [samples].
    """
    return _profile(energy, correct.long()[sample_of_action(offsets)], 2)


def _profile(values: Tensor, index: Tensor, bins: int) -> Profile:
    count = torch.bincount(index, minlength=bins)
    total = torch.zeros(bins, dtype=torch.float64, device=values.device).index_add_(0, index, values.double())
    return Profile(total / count, count)
