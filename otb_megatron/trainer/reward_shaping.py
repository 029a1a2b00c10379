"""From the verifier's rewards to those that are learned from. For the driver only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from otb_megatron.algorithms import AdaptiveKL, reward_kl, soft_overlong_punishment
from otb_megatron.config import Config
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.types import Trajectories


class RewardShaping:
    """The overlong punishment, the KL inside the reward, and the controller that steers its coefficient."""

    def __init__(self, config: Config) -> None:
        self._overlong_buffer_tokens = config.rewards.overlong_buffer_tokens
        self._max_response_tokens = config.rollout.max_response_tokens
        self._kl = config.algorithm.reward_kl
        self._coef = self._kl.coef if self._kl else 0.0

    def apply(self, trajectories: Trajectories, log_prob: Tensor, reference_log_prob: Tensor | None, metrics: Metrics) -> Tensor:
        """The rewards of one step; an adaptive coefficient moves after them.

        Args:
            log_prob: [actions], of the policy that is trained, before this step's first update.
            reference_log_prob: [actions]; None where no KL is configured.

        Returns:
            float32 [actions].
        """
        rewards, lengths = trajectories.rewards, trajectories.action_offsets.diff()
        if self._overlong_buffer_tokens is not None:
            punishment = soft_overlong_punishment(lengths, self._max_response_tokens, self._overlong_buffer_tokens)
            answered = lengths > 0
            rewards = rewards.index_add(0, trajectories.action_offsets[1:][answered] - 1, punishment[answered])
            metrics.mean("rewards/overlong", float(punishment.sum(dtype=torch.float64)), lengths.numel())
        if self._kl is not None:
            assert reference_log_prob is not None
            kl = reward_kl(log_prob, reference_log_prob, self._kl.estimator)
            rewards = rewards - self._coef * kl
            total = float(kl.sum(dtype=torch.float64))
            metrics.mean("rewards/kl", total, kl.numel())
            metrics.mean("rewards/kl_coef", self._coef, 1)
            if self._kl.adaptive is not None:
                controller = AdaptiveKL(self._coef, self._kl.adaptive.target, self._kl.adaptive.horizon)
                self._coef = controller.updated(total / kl.numel(), lengths.numel()).coef
        return rewards

    def state_dict(self) -> dict[str, Any]:
        """The coefficient where the controller has moved it; a fixed one is the configuration's."""
        return {"kl_coef": self._coef if self._kl is not None and self._kl.adaptive is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the coefficient that a controller had reached, if one moves it here too."""
        if self._kl is not None and self._kl.adaptive is not None and state["kl_coef"] is not None:
            self._coef = state["kl_coef"]
