"""Which tokens drive the entropy down: the selections that the losses `clip_cov` and `kl_cov` act on (arXiv 2505.22617).

The change of entropy in a step is minus the covariance of log-prob and advantage, so the tokens with the largest

    cov_t = (A_t - mean A) (log_prob_t - mean log_prob)

are the ones that cost entropy. Means run over all actions of the optimizer step, and log_prob is the one before its first
update: the choice then does not depend on micro-batches or ranks. The authors' code and verl recompute it for each micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    old_log_prob: Tensor, advantages: Tensor, generator: torch.Generator, *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0
) -> Tensor:
    """bool [actions]: max(1, fraction * actions) tokens, drawn from those with low < cov < high (all of these, if they are fewer)."""
    covariance = token_covariance(old_log_prob, advantages)
    eligible = ((covariance > low) & (covariance < high)).nonzero().flatten()
    count = min(max(1, int(fraction * covariance.numel())), eligible.numel())
    chosen = eligible[torch.randperm(eligible.numel(), generator=generator, device=generator.device)[:count].to(eligible.device)]
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill_(0, chosen, True)


def kl_cov_selection(old_log_prob: Tensor, advantages: Tensor, *, fraction: float = 2e-4) -> Tensor:
    """bool [actions]: the max(1, fraction * actions) tokens with the largest covariance."""
    covariance = token_covariance(old_log_prob, advantages)
    count = min(max(1, int(fraction * covariance.numel())), covariance.numel())
    return torch.zeros_like(covariance, dtype=torch.bool).index_fill_(0, covariance.topk(count).indices, True)
