"""The sums of `row_sums` for whole tokens: merging those of disjoint sets of columns, and the statistics and gradients they give."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otb_megatron.ops.row_sums import Coefficients

LN_2 = math.log(2.0)


class Statistics(NamedTuple):
    """float64 [tokens] each."""

    log_prob: Tensor
    entropy: Tensor
    rest: Tensor
    normalizer: Tensor  # log2 sum_v 2^(scale z_v)


def merge(partials: Tensor) -> Tensor:
    """Sums [parts, 5, tokens] over disjoint sets of columns -> the sums [5, tokens] over their union, by rescaling to one reference."""
    reference, s, r, t, target = partials.unbind(1)
    highest = reference.amax(0)
    shift = reference - highest
    factor = torch.exp2(shift)
    return torch.stack([highest, (factor * s).sum(0), (factor.square() * r).sum(0), (factor * (t + shift * s)).sum(0), target.sum(0)])


def statistics_of(sums: Tensor) -> Statistics:
    """Sums over the whole vocabulary [5, tokens] -> statistics.

    Nothing cancels, however close pi(y) is to 0 or 1: log_prob comes from the odds of the rest against y, and
    entropy = -pi_y log pi_y + sum over v != y of pi_v (log Z - z_v) is a sum of terms that are all >= 0.
    """
    reference, s, r, t, target = sums
    gap = target - reference
    log2_s = torch.log2(s)
    log2_z = torch.logaddexp2(log2_s, gap)  # relative to the reference
    log_prob = -torch.logaddexp(LN_2 * (log2_s - gap), torch.zeros_like(gap))
    entropy = -log_prob * log_prob.exp() + LN_2 * (torch.exp2(log2_s - log2_z) * log2_z - torch.exp2(-log2_z) * t)
    return Statistics(log_prob, entropy, rest=r * torch.exp2(-2 * log2_z), normalizer=reference + log2_z)


def coefficients_of(statistics: Statistics, scale: Tensor, log_prob_grad: Tensor, entropy_grad: Tensor, rest_grad: Tensor) -> Coefficients:
    """Gradients of the loss with respect to the statistics [tokens] -> the form of its gradient with respect to the logits z.

    With b = 1 / temperature and H = entropy:
        d log_prob / d z_v = b (1[v = y] - pi_v)
        d entropy  / d z_v = -b pi_v (log pi_v + H)
        d rest     / d z_v = 2 b pi_v (pi_v 1[v != y] - rest)
    """
    log_prob, entropy, rest, normalizer = statistics
    g_log_prob, g_entropy, g_rest = log_prob_grad.double(), entropy_grad.double(), rest_grad.double()
    b = LN_2 * scale.double()
    at_target = -g_log_prob * torch.expm1(log_prob) - log_prob.exp() * (g_entropy * (log_prob + entropy) + 2 * g_rest * rest)
    return Coefficients(
        normalizer=normalizer,
        constant=(-b * (g_log_prob + g_entropy * entropy + 2 * g_rest * rest)).float(),
        linear=(-b * LN_2 * g_entropy).float(),
        square=(2 * b * g_rest).float(),
        target=(b * at_target).float(),
    )
