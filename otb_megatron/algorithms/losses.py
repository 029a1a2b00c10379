"""LOSSES, the policy losses by name. Each gives one value per action: `reduce` weights them, and the training step alone sums.

Every loss takes

    log_prob: [actions], of the policy being trained, with gradient;
    old_log_prob: [actions], of the policy before this step's first update;
    advantages: [actions];

and what its entry in LOSSES requires besides. r = exp(log_prob - old_log_prob) is the ratio, with the exponent clamped to
+-20, beyond which a loss is constant.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from otb_megatron.algorithms.covariance import clip_cov_selection, kl_cov_selection
from otb_megatron.algorithms.options import AboveOne, NonNegative, check_required, choose
from otb_megatron.algorithms.ragged import sample_of_action, sums
from otb_megatron.config import Aggregation

_MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8 is beyond any bound in use, and far from float32 overflow


@dataclass(frozen=True)
class LossTerms:
    loss: Tensor  # [actions], to be minimised
    metrics: dict[str, Tensor]  # each [actions], without gradient; what is reported is the mean over actions


@dataclass(frozen=True)
class Loss:
    """A policy loss. Its options are the keyword-only parameters of its functions."""

    function: Callable[..., LossTerms]
    required: frozenset[str] = frozenset()  # arguments beyond log_prob, old_log_prob and advantages
    aggregation: Aggregation | None = None  # the one its paper derives it for and without which it is another method; None for any
    min_optimizer_steps: int = 1  # smallest algorithm.optimizer_steps_per_rollout that makes sense: below it the method is the plain policy gradient
    selection: Callable[..., Tensor] | None = None  # gives `selected` from old_log_prob and advantages of a whole optimizer step, and a generator

    @property
    def functions(self) -> list[Callable[..., object]]:
        """All that take options."""
        return [self.function] if self.selection is None else [self.function, self.selection]


def clipped_surrogate(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
    clip_ratio_dual: AboveOne | None = None,
) -> LossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347, equation 7) with separate bounds and an optional dual clip.

        loss = -min(r A, clip(r, 1 - low, 1 + high) A)
        loss = min(loss, -dual A) where A < 0, if `clip_ratio_dual` is given

    high > low is DAPO's clip-higher (arXiv 2503.14476); the dual clip is that of arXiv 1912.09729.

    Example: A = 1: r = 1.5 gives -1.2 and no gradient, r = 0.5 gives -0.5. A = -1: r = 0.5 gives 0.8 and no gradient, r = 5
    gives 5, or 3 and no gradient under a dual clip of 3.

    Returns:
        Metrics: `clip_fraction` (a bound is active), `dual_clip_fraction`, `approx_kl` (old_log_prob - log_prob).
    """
    ratio, approx_kl = _ratio(log_prob, old_log_prob)
    loss, clipped = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    metrics = {"clip_fraction": clipped, "approx_kl": approx_kl}
    if clip_ratio_dual is not None:
        bound = -clip_ratio_dual * advantages
        dual = (advantages < 0) & (loss > bound)
        loss = torch.where(dual, bound, loss)
        metrics["dual_clip_fraction"] = dual.to(log_prob.dtype)
    return LossTerms(loss, metrics)


def gspo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    *,
    clip_ratio_low: NonNegative = 3e-4,
    clip_ratio_high: NonNegative = 4e-4,
) -> LossTerms:
    """Group sequence policy optimisation (arXiv 2507.18071, equations 5 and 7), in its per-token form (GSPO-token).

        s = exp(mean over the response of (log_prob - old_log_prob))
        loss = -min(s A, clip(s, 1 - low, 1 + high) A)          the gradient of s at action t is s grad log_prob_t

    Aggregated with seq-mean-token-mean, as in the paper: the gradient of a response then is that of its mean log-prob, and every
    response counts the same. The bounds are the paper's, small because s is a mean. Needs whole responses: every action of a
    sample must be in the call.

    Example: two actions with log ratios 0.2 and 0 have s = exp(0.1) = 1.10517 both; unclipped with A = 1 loss and gradient
    are -1.10517 each.

    Args:
        offsets: [samples + 1], where each sample of this call starts.
    """
    log_ratio, approx_kl = log_prob - old_log_prob, (old_log_prob - log_prob).detach()
    mean = sums(log_ratio.detach(), offsets) / offsets.diff().clamp(min=1)
    at_action = mean.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)[sample_of_action(offsets)]
    ratio = (at_action + log_prob - log_prob.detach()).exp()
    loss, clipped = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return LossTerms(loss, {"clip_fraction": clipped, "approx_kl": approx_kl})


def cispo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: NonNegative = 1.0,
    clip_ratio_high: NonNegative = 0.2,
) -> LossTerms:
    """CISPO (arXiv 2506.13585, equations 4 and 5): the importance weight is clipped, and every token keeps its gradient.

        loss = -sg(clip(r, 1 - low, 1 + high)) A log_prob

    The paper has no lower bound in effect; low = 1 is none.

    Example: r = 1.5, A = 2: loss -2.4 log_prob, gradient -2.4.
    """
    ratio, approx_kl = _ratio(log_prob, old_log_prob)
    weight = ratio.detach().clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    clipped = (weight != ratio.detach()).to(log_prob.dtype)
    return LossTerms(-weight * advantages * log_prob, {"clip_fraction": clipped, "approx_kl": approx_kl})


def reinforce(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> LossTerms:
    """Plain policy gradient (Williams 1992), also the loss of GPG (arXiv 2504.02546): no ratio, no clipping.

        loss = -A log_prob

    Its gradient is that of the objective for the first update after a rollout only.

    Example: A = 2, log_prob = -0.5: loss 1, gradient -2.
    """
    return LossTerms(-advantages * log_prob, {"approx_kl": (old_log_prob - log_prob).detach()})


def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    selected: Tensor,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.2,
) -> LossTerms:
    """Clip-Cov (arXiv 2505.22617): the clipped surrogate without the tokens whose covariance drives entropy down.

        loss = 0 where selected, clipped_surrogate elsewhere

    Args:
        selected: bool [actions], from `covariance.clip_cov_selection` over the whole optimizer step.
    """
    ratio, approx_kl = _ratio(log_prob, old_log_prob)
    loss, clipped = _clipped(ratio, advantages, clip_ratio_low, clip_ratio_high)
    metrics = {"clip_fraction": clipped, "approx_kl": approx_kl, "selected_fraction": selected.to(log_prob.dtype)}
    return LossTerms(loss.masked_fill(selected, 0.0), metrics)


def kl_cov(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor, *, kl_coef: NonNegative = 1.0) -> LossTerms:
    """KL-Cov (arXiv 2505.22617): a KL penalty on the tokens whose covariance drives entropy down.

        loss = -r A, and -r A + kl_coef |log_prob - old_log_prob| where selected

    The penalty has no gradient at r = 1: it acts from the second optimizer step of a rollout on.

    Example: r = e^0.5, A = 1, kl_coef 1: loss -1.64872, and -1.14872 where selected.

    Args:
        selected: bool [actions], from `covariance.kl_cov_selection` over the whole optimizer step.
    """
    ratio, approx_kl = _ratio(log_prob, old_log_prob)
    penalty = kl_coef * (log_prob - old_log_prob).abs().masked_fill(~selected, 0.0)
    return LossTerms(-ratio * advantages + penalty, {"approx_kl": approx_kl, "selected_fraction": selected.to(log_prob.dtype)})


def vapo(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    positive: Tensor,
    *,
    clip_ratio_low: NonNegative = 0.2,
    clip_ratio_high: NonNegative = 0.28,
    nll_coef: NonNegative = 0.1,
) -> LossTerms:
    """VAPO (arXiv 2504.05118): clip-higher plus the likelihood of positive examples.

        loss = clipped_surrogate - nll_coef positive log_prob

    Aggregated with token-mean, as in the paper: `positive` makes that the mean over the tokens of positive examples.

    Example: A = 0, log_prob = -2, positive = 1.5, nll_coef 0.1: loss 0.3.

    Args:
        positive: [actions], from `positive_example_weights`: 0 in responses that are not positive examples.
    """
    terms = clipped_surrogate(log_prob, old_log_prob, advantages, clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high)
    nll = -positive * log_prob
    return LossTerms(terms.loss + nll_coef * nll, {**terms.metrics, "positive_nll": nll.detach()})


def positive_example_weights(positive: Tensor, offsets: Tensor) -> Tensor:
    """float32 [actions]: what makes a token-mean over all actions the token-mean over the positive examples.

    Example: lengths 1 and 3, the second is positive: 0, 4/3, 4/3, 4/3.

    Args:
        positive: bool [samples], e.g. whether the answer is right.
        offsets: [samples + 1] of one optimizer step.
    """
    at_action = positive[sample_of_action(offsets)].float()
    return at_action * at_action.numel() / at_action.sum().clamp(min=1)


def negative_log_likelihood(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> LossTerms:
    """Supervised fine-tuning: loss = -log_prob. The other arguments are ignored; they give all losses one form."""
    return LossTerms(-log_prob, {})


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, *, clip: NonNegative = 0.5) -> LossTerms:
    """The critic's clipped squared error, as in PPO's reference code and verl (whose default bound this is).

        loss = max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    Example: V = 2, V_old = 1, R = 1.8, clip 0.5: max(0.04, 0.09) / 2 = 0.045, without gradient.

    Args:
        values: [actions], with gradient.
        old_values: [actions], of the critic before this step's first update.
        targets: [actions], from `value_targets`.
    """
    unclipped = (values - targets).square()
    clipped = (torch.clamp(values, old_values - clip, old_values + clip) - targets).square()
    return LossTerms(torch.maximum(unclipped, clipped) / 2, {"clip_fraction": (clipped > unclipped).to(values.dtype)})


def _ratio(log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """The ratio, with gradient, and old_log_prob - log_prob, without."""
    log_ratio = (log_prob - old_log_prob).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return log_ratio.exp(), -log_ratio.detach()


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, and 1 where a bound is active."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(ratio.dtype)


LOSSES: dict[str, Loss] = {
    "clipped_surrogate": Loss(clipped_surrogate),
    "vanilla": Loss(clipped_surrogate),  # verl's name
    "gspo": Loss(gspo, frozenset({"offsets"}), "seq-mean-token-mean"),
    "cispo": Loss(cispo),
    "reinforce": Loss(reinforce),
    "gpg": Loss(reinforce),
    "clip_cov": Loss(clip_cov, frozenset({"selected"}), selection=clip_cov_selection),
    "kl_cov": Loss(kl_cov, frozenset({"selected"}), min_optimizer_steps=2, selection=kl_cov_selection),
    "vapo": Loss(vapo, frozenset({"positive"}), "token-mean"),
    "negative_log_likelihood": Loss(negative_log_likelihood),
}

_PROVIDED_BY = {
    "offsets": "it compares whole responses, and this run does not hand their bounds to the loss; choose e.g. clipped_surrogate",
    "selected": "it needs a choice of tokens over the whole optimizer step, which the caller makes with the loss's `selection`",
    "positive": "it needs to know the right answers, which the caller weighs with `positive_example_weights`",
}


def check_loss_fields(name: str, available: Collection[str]) -> None:
    """Raises a UserError that names each argument which the loss `name` requires and which is not `available`, and the way out."""
    check_required("loss", name, choose("loss", name, LOSSES).required, available, _PROVIDED_BY)
