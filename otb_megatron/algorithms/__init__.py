"""Pure functions of reinforcement learning on ragged, action-only tensors. Methods are chosen by name from ADVANTAGES, LOSSES and CORRECTIONS."""

from otb_megatron.algorithms.advantages import ADVANTAGES, AdvantageInputs, Estimator, check_fields, estimate, needs_critic
from otb_megatron.algorithms.corrections import CORRECTIONS, Corrected, Mismatch, mismatch
from otb_megatron.algorithms.energy import energy
from otb_megatron.algorithms.kl import AdaptiveKL, kl_estimate, reward_kl
from otb_megatron.algorithms.losses import LOSSES, Loss, LossTerms, check_loss_fields, positive_example_weights, value_loss
from otb_megatron.algorithms.options import check_options, choose, own_options
from otb_megatron.algorithms.ragged import sums, whiten
from otb_megatron.algorithms.reduce import action_weights
from otb_megatron.algorithms.selection import groups_with_signal, soft_overlong_punishment
from otb_megatron.algorithms.token_returns import explained_variance, value_targets
from otb_megatron.algorithms.variance import energy_by_correctness, energy_by_position, energy_by_probability, variance_proxies

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "AdaptiveKL",
    "AdvantageInputs",
    "Corrected",
    "Estimator",
    "Loss",
    "LossTerms",
    "Mismatch",
    "action_weights",
    "check_fields",
    "check_loss_fields",
    "check_options",
    "choose",
    "energy",
    "energy_by_correctness",
    "energy_by_position",
    "energy_by_probability",
    "estimate",
    "explained_variance",
    "groups_with_signal",
    "kl_estimate",
    "mismatch",
    "needs_critic",
    "own_options",
    "positive_example_weights",
    "reward_kl",
    "soft_overlong_punishment",
    "sums",
    "value_loss",
    "value_targets",
    "variance_proxies",
    "whiten",
]
