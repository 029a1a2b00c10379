"""Which tokens drive the entropy down: the selections that the losses `clip_cov` and `kl_cov` act on (arXiv 2505.22617).

The change of entropy in a step is minus the covariance of log-prob and advantage, so the tokens with the largest

    cov_t = (A_t - mean A) (log_prob_t - mean log_prob)

are the ones that cost entropy. Means run over all actions of the optimizer step, and log_prob is the one before its first
update: the choice then does not depend on micro-batches or ranks. The authors' code and verl recompute it for each micro-batch.

Selections take a random generator, whether they draw or not, and give bool [actions].
"""

from __future__ import annotations

import torch
from torch import Tensor

from otb_megatron.algorithms.options import Fraction


def token_covariance(old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """cov_t, float64 [actions].

    Example: A = (1, 0, -1) and log_prob = (-1, -2, -3) give (1, 0, 1).

    Args:
        old_log_prob: [actions] of the whole optimizer step.
        advantages: [actions].
    """
    log_prob, advantages = old_log_prob.double(), advantages.double()
    return (advantages - advantages.mean()) * (log_prob - log_prob.mean())


def clip_cov_selection(
    old_log_prob: Tensor,
    advantages: Tensor,
    generator: torch.Generator,
    *,
    selected_fraction: Fraction = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Tensor:
    """max(1, selected_fraction * actions) tokens, drawn from those whose covariance is between the bounds (all of these, if they are fewer)."""
    covariance = token_covariance(old_log_prob, advantages)
    eligible = ((covariance > covariance_low) & (covariance < covariance_high)).nonzero().flatten()
    count = min(max(1, int(selected_fraction * covariance.numel())), eligible.numel())
    chosen = eligible[torch.randperm(eligible.numel(), generator=generator, device=generator.device)[:count].to(eligible.device)]
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill_(0, chosen, True)


def kl_cov_selection(old_log_prob: Tensor, advantages: Tensor, generator: torch.Generator, *, selected_fraction: Fraction = 2e-4) -> Tensor:
    """The max(1, selected_fraction * actions) tokens with the largest covariance."""
    covariance = token_covariance(old_log_prob, advantages)
    count = min(max(1, int(selected_fraction * covariance.numel())), covariance.numel())
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill_(0, covariance.topk(count).indices, True)
