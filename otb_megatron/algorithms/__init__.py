"""Pure functions of reinforcement learning on ragged, action-only tensors. Methods are chosen by name from ADVANTAGES and LOSSES."""

from otb_megatron.algorithms.advantages import ADVANTAGES, AdvantageInputs, Estimator, check_fields, estimate, needs_critic
from otb_megatron.algorithms.corrections import Mismatch, mismatch, truncated_importance_weights
from otb_megatron.algorithms.energy import energy
from otb_megatron.algorithms.kl import kl_estimate
from otb_megatron.algorithms.losses import LOSSES, Loss, LossTerms, check_loss_fields, value_loss
from otb_megatron.algorithms.options import check_options, choose
from otb_megatron.algorithms.reduce import action_weights
from otb_megatron.algorithms.token_returns import explained_variance, value_targets

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AdvantageInputs",
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
    "estimate",
    "explained_variance",
    "kl_estimate",
    "mismatch",
    "needs_critic",
    "truncated_importance_weights",
    "value_loss",
    "value_targets",
]
