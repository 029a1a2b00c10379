"""Estimates of KL(policy || reference) from sampled actions, as a loss term and inside the reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

KLKind = Literal["k1", "k2", "k3"]
RewardKLKind = Literal["k1", "k2", "k3", "abs"]

_MAX_LOG_RATIO = 20.0  # keeps k3's exponential far from float32 overflow
_MAX_RELATIVE_ERROR = 0.2  # of the adaptive controller, from its paper


def kl_estimate(log_prob: Tensor, reference_log_prob: Tensor, kind: KLKind) -> Tensor:
    """A per-action estimate of KL(pi || ref), as a loss term, for actions drawn from pi.

    With d = log_prob - reference_log_prob (J. Schulman, "Approximating KL divergence", 2020):

        kind  value            gradient, times grad log_prob
        k1    d                d
        k2    d^2 / 2          d
        k3    exp(-d) - 1 + d  1 - exp(-d)

    The gradient of KL(pi || ref) is E[d grad log pi]. k2 has it by plain differentiation. k1, differentiated plainly, would have
    grad log pi, whose mean is zero: no penalty at all; here its value is k1 and its gradient the right one, straight
    through k2. k3 is GRPO's term (arXiv 2402.03300, equation 4) with its own derivative, whose mean is the gradient of
    KL(ref || pi), the same to first order near the reference (arXiv 2510.01555 compares these). d is clamped to +-20 in k3.

    Example: d = 0.5 gives the values 0.5, 0.125, 0.10653 and the gradients 0.5, 0.5, 0.39347.

    Args:
        log_prob: [actions], with gradient.
        reference_log_prob: [actions].

    Returns:
        [actions].
    """
    difference = log_prob - reference_log_prob
    if kind == "k1":
        k2 = difference.square() / 2
        return difference.detach() + k2 - k2.detach()
    if kind == "k2":
        return difference.square() / 2
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(-difference) + difference


def reward_kl(log_prob: Tensor, reference_log_prob: Tensor, kind: RewardKLKind) -> Tensor:
    """The KL of each action as it is taken off its reward: r_t - coef kl_t (arXiv 1909.08593, equation 2, with k1).

    Only k1 is unbiased here: a reward is not differentiated, and the policy gradient of E[-d] is that of -KL(pi || ref).
    "abs" is |d|, verl's; k2 and k3 as in `kl_estimate`.

    Example: d = 0.5 gives 0.5 for k1 and abs, 0.125 for k2; a reward of 1 with coef 0.1 becomes 0.95 and 0.9875.

    Args:
        log_prob: [actions], of the policy that sampled.
        reference_log_prob: [actions].

    Returns:
        [actions], without gradient.
    """
    if kind == "abs":
        return (log_prob - reference_log_prob).abs().detach()
    return kl_estimate(log_prob, reference_log_prob, kind).detach()


@dataclass(frozen=True)
class AdaptiveKL:
    """Steers the KL coefficient towards a target (arXiv 1909.08593, section 2.2).

        coef <- coef (1 + clip(kl / target - 1, -0.2, 0.2) min(samples / horizon, 1))

    The minimum is ours: a step of more than `horizon` samples would move the coefficient by more than a fifth, and one of more than
    five times as many could make it negative.
    A fixed coefficient is a number and needs no controller.
    """

    coef: float
    target: float  # nats per action
    horizon: float  # samples

    def updated(self, kl: float, num_samples: int) -> AdaptiveKL:
        """The controller after a step of `num_samples` samples whose mean KL was `kl`.

        Example: coef 0.1, target 0.05, horizon 1000: kl 0.1 over 100 samples gives 0.1 (1 + 0.2 * 0.1) = 0.102, and
        over 6000 samples, like over 1000, 0.12.
        """
        error = min(max(kl / self.target - 1, -_MAX_RELATIVE_ERROR), _MAX_RELATIVE_ERROR)
        return AdaptiveKL(self.coef * (1 + error * min(num_samples / self.horizon, 1.0)), self.target, self.horizon)
