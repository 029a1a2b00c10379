"""CORRECTIONS, what is done about the mismatch between the policy that is trained and the engine that sampled, by name; and its metrics.

The same weights give, through two engines, two slightly different policies; stale samples add to it. Every correction takes

    log_prob: [actions], of the trainer's policy before this step's first update;
    rollout_log_prob: [actions], as the engine reported it when it sampled;
    offsets: [samples + 1], where each sample starts;

and keyword-only options. rho_t = exp(log_prob_t - rollout_log_prob_t).

What the rest of a step sees of a correction, c_t being its weight:

- the policy loss of an action is multiplied by c_t; entropy bonus and KL are not, they need no importance weight to be what they are;
- OTB's energy is multiplied by c_t^2, since the gradient's term is: W_t = sum_{j <= t} c_j^2 w_j. A rejected action has c = 0, adds no
  gradient and therefore no energy, and a response rejected as a whole has no say in an energy-weighted baseline;
- rewards are untouched, and estimators without energies (grpo, rloo, ...) compare all responses, rejected or not: a rejected response's
  reward still tells how hard its prompt is;
- a rejected action is out of the loss with all its terms. It keeps its place in the denominators of `reduce.action_weights`: rejection
  makes a step smaller, and never scales up what is left. verl drops rejected tokens from its denominators.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from otb_megatron.algorithms.options import NonNegative, Positive
from otb_megatron.algorithms.ragged import sample_of_action, sums


@dataclass(frozen=True)
class Corrected:
    """A correction of every action, without gradient."""

    weight: Tensor | None  # [actions], c, 0 where rejected; None for 1 everywhere
    clipped: Tensor  # bool [actions], whose weight was lowered to the bound
    rejected: Tensor  # bool [actions], out of the loss


def no_correction(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor) -> Corrected:
    """Takes the engine's policy for the trainer's."""
    nothing = torch.zeros_like(log_prob, dtype=torch.bool)
    return Corrected(None, nothing, nothing)


def truncated_importance_weights(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, clip: Positive = 2.0) -> Corrected:
    """Truncated importance sampling per token (Ionides 2008; Yao et al. 2025, "TIS").

        min(rho_t, clip)

    Example: log ratios 0.5, -0.5, 2 with clip 2 give 1.64872, 0.60653, 2.
    """
    return _truncated((log_prob - rollout_log_prob).detach().exp(), clip)


def sequence_importance_weights(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, clip: Positive = 2.0) -> Corrected:
    """Truncated importance sampling per response (Liu, Li et al. 2025, "When speed kills stability").

        min(product of rho over the response, clip) for each of its actions

    Unbiased up to the truncation, where the token form is not; its variance grows with length.

    Example: log ratios 0.5 and 0.1 of one response give exp(0.6) = 1.82212 twice.
    """
    total, _ = _log_ratio_sums(log_prob, rollout_log_prob, offsets)
    return _truncated(_at_actions(total.exp(), offsets, log_prob), clip)


def geometric_importance_weights(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, clip: Positive = 2.0) -> Corrected:
    """Truncated geometric mean of the ratios of a response (Liu, Li et al. 2025): comparable across lengths.

        min(exp(mean of log rho over the response), clip) for each of its actions

    Example: log ratios 0.5 and 0.1 of one response give exp(0.3) = 1.34986 twice.
    """
    _, mean = _log_ratio_sums(log_prob, rollout_log_prob, offsets)
    return _truncated(_at_actions(mean.exp(), offsets, log_prob), clip)


def masked_importance_weights(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, low: NonNegative = 0.5, high: Positive = 5.0) -> Corrected:
    """IcePop (arXiv 2510.18855): tokens whose ratio leaves the bounds are rejected, not clipped.

        rho_t if low <= rho_t <= high, else rejected          the paper uses 0.5 and 5

    Example: log ratios 0.5, -1, 2 with bounds 0.5 and 5 give 1.64872, 0, 0.
    """
    ratio = (log_prob - rollout_log_prob).detach().exp()
    return _rejected(ratio, ~((ratio >= low) & (ratio <= high)))


def geometric_sequence_mask(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, low: NonNegative = 0.99, high: Positive = 1.01) -> Corrected:
    """Rejects whole responses by their geometric mean ratio (Liu, Li et al. 2025).

        1 if low <= exp(mean of log rho) <= high, else rejected

    Example: log ratios (0.01, -0.01) and (0.2, 0.2) with bounds 0.99 and 1.01 give 1, 1, 0, 0.
    """
    _, mean = _log_ratio_sums(log_prob, rollout_log_prob, offsets)
    ratio = mean.exp()
    outside = ~((ratio >= low) & (ratio <= high))
    return _rejected(torch.ones_like(log_prob), outside[sample_of_action(offsets)])


def trust_region_mask(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor, *, max_token_kl: Positive = 0.05) -> Corrected:
    """Trust region masking (arXiv 2512.23075): one token outside the trust region rejects its whole response.

        1 if max over the response of (rho - 1 - log rho) <= max_token_kl, else rejected

    The paper bounds the exact KL of each position; this is its k3 estimate at the sampled token, which needs no logits of the
    engine and is never negative.

    Example: log ratios (0.1, 0) and (0.1, 1): k3 is 0.00517, 0 and 0.00517, 0.71828; a bound of 0.05 gives 1, 1, 0, 0.
    """
    log_ratio = (log_prob - rollout_log_prob).detach().double()
    outside = sums((~(torch.expm1(log_ratio) - log_ratio <= max_token_kl)).double(), offsets) > 0
    return _rejected(torch.ones_like(log_prob), outside[sample_of_action(offsets)])


CORRECTIONS: dict[str, Callable[..., Corrected]] = {
    "none": no_correction,
    "truncated": truncated_importance_weights,
    "truncated_sequence": sequence_importance_weights,
    "truncated_geometric": geometric_importance_weights,
    "masked": masked_importance_weights,
    "masked_sequence": geometric_sequence_mask,
    "trust_region": trust_region_mask,
}


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer's policy is from the engine's, over the actions of a batch. Scalars, float64."""

    kl: Tensor  # mean of -log rho: k1 estimate of KL(rollout || trainer)
    kl_k3: Tensor  # mean of rho - 1 - log rho: the same quantity, never negative, less noisy
    ratio_p01: Tensor  # quantiles of rho
    ratio_p50: Tensor
    ratio_p99: Tensor
    ratio_max: Tensor
    chi2: Tensor  # mean of rho^2 - 1: chi-squared divergence, the variance of the weights
    effective_sample_size: Tensor  # (sum rho)^2 / (actions sum rho^2), between 0 and 1
    sequence_effective_sample_size: Tensor  # the same for the product of rho over each response
    probability_difference: Tensor  # mean of |pi_train - pi_rollout|


def mismatch(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor) -> Mismatch:
    """The metrics of `Mismatch`, for at least one action.

    Example: log ratios log 2 and log 1/2, one response each: kl = 0, kl_k3 = 0.25, chi2 = (4 + 0.25) / 2 - 1 = 1.125,
    effective sample size 2.5^2 / (2 * 4.25) = 0.73529.
    """
    log_ratio = (log_prob - rollout_log_prob).detach().double()
    ratio = log_ratio.exp()
    total, _ = _log_ratio_sums(log_prob, rollout_log_prob, offsets)
    return Mismatch(
        kl=-log_ratio.mean(),
        kl_k3=(torch.expm1(log_ratio) - log_ratio).mean(),
        ratio_p01=_quantile(log_ratio, 0.01).exp(),
        ratio_p50=_quantile(log_ratio, 0.50).exp(),
        ratio_p99=_quantile(log_ratio, 0.99).exp(),
        ratio_max=log_ratio.max().exp(),
        chi2=ratio.square().mean() - 1,
        effective_sample_size=_effective_sample_size(log_ratio),
        sequence_effective_sample_size=_effective_sample_size(total[offsets.diff() > 0]),
        probability_difference=(log_prob.detach().double().exp() - rollout_log_prob.double().exp()).abs().mean(),
    )


def _log_ratio_sums(log_prob: Tensor, rollout_log_prob: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and mean of log rho over each response, float64 [samples]."""
    total = sums((log_prob - rollout_log_prob).detach().double(), offsets)
    return total, total / offsets.diff().clamp(min=1)


def _at_actions(per_sample: Tensor, offsets: Tensor, like: Tensor) -> Tensor:
    return per_sample[sample_of_action(offsets)].to(like.dtype)


def _truncated(ratio: Tensor, clip: float) -> Corrected:
    return Corrected(ratio.clamp(max=clip), ratio > clip, torch.zeros_like(ratio, dtype=torch.bool))


def _rejected(weight: Tensor, outside: Tensor) -> Corrected:
    return Corrected(weight.masked_fill(outside, 0.0), torch.zeros_like(outside), outside)


def _quantile(values: Tensor, fraction: float) -> Tensor:
    """The element at that place of the sorted values: torch.quantile refuses more than 2^24 elements."""
    return values.kthvalue(1 + round(fraction * (values.numel() - 1))).values


def _effective_sample_size(log_weights: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) from log w, shifted by the largest so that products over long responses do not overflow."""
    weights = (log_weights - log_weights.max()).exp()
    return weights.sum().square() / (weights.numel() * weights.square().sum())
