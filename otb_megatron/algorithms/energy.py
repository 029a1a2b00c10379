"""The energy of an action: OTB's proxy of the squared norm of its score, from the statistics head's numbers."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from otb_megatron.types import PolicyStatistics

_MAX_CHECKED_ACTIONS = 65536  # the invariant is checked on evenly spread actions, so that its cost does not grow with the batch
_RELATIVE_TOLERANCE = 1e-4  # accuracy the statistics head promises for the energy
_ABSOLUTE_TOLERANCE = 1e-6  # of 1 - pi: float32 log-probs near 0 carry about 1e-7


def energy(statistics: PolicyStatistics) -> Tensor:
    """w = ||e_y - pi||^2, the squared norm of the gradient of log pi(y) in the logits: the logit-gradient proxy of
    arXiv 2602.07078.

        w = (1 - pi(y))^2 + sum_{v != y} pi(v)^2 = expm1(log pi(y))^2 + rest

    The textbook form 1 - 2 pi(y) + sum_v pi(v)^2 is the same number and cancels on near-deterministic tokens: for
    pi(y) = 1 - 1e-6 it is 0 or negative in float32, here it keeps its relative accuracy.

    By Cauchy-Schwarz 0 <= rest <= (1 - pi(y))^2, so (1 - pi)^2 <= w <= 2 (1 - pi)^2. A sample of the actions is checked
    against it: a violation means that the statistics are wrong (padded vocabulary not masked, shards not reduced).

    Example: pi = (0.5, 0.3, 0.2) and y = 0 give rest = 0.09 + 0.04 = 0.13 and w = 0.25 + 0.13 = 0.38.

    Returns:
        [actions], the dtype of the statistics.

    Warns:
        RuntimeWarning: statistics that no probability distribution has, with the index of the first such action.
    """
    one_minus_pi = -torch.expm1(statistics.log_prob)
    _warn_if_impossible(statistics, one_minus_pi)
    return one_minus_pi.square() + statistics.rest


def _warn_if_impossible(statistics: PolicyStatistics, one_minus_pi: Tensor) -> None:
    stride = max(1, -(-one_minus_pi.numel() // _MAX_CHECKED_ACTIONS))
    sampled, rest = one_minus_pi[::stride], statistics.rest[::stride]
    bound = (sampled.clamp(min=0.0) * (1 + _RELATIVE_TOLERANCE) + _ABSOLUTE_TOLERANCE).square()
    possible = (sampled >= -_ABSOLUTE_TOLERANCE) & (rest >= 0) & (rest <= bound)  # false for NaN
    if bool(possible.all()):
        return
    first = int((~possible).nonzero()[0]) * stride
    warnings.warn(
        f"action {first}: log-prob {float(statistics.log_prob[first]):.6g} and rest {float(statistics.rest[first]):.6g} belong to no probability "
        f"distribution (rest must lie between 0 and (1 - pi)^2); {int((~possible).sum())} of {sampled.numel()} checked actions are like it. "
        "The energies of this batch are not to be trusted.",
        RuntimeWarning,
        stacklevel=3,
    )
