"""The nouns that travel between stages. Shapes stand beside each field.

Between stages a batch is flat arrays plus offsets ("ragged") and holds action tokens only: prompt,
tool-output and padding tokens never reach an estimator. A response of one turn and one of many turns
are therefore the same thing for every algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor


class UserError(Exception):
    """A fault that the user can mend. The message names the value and the remedy; the command line prints it without a traceback."""

    told = False  # whether it was printed already, before engines were closed and ranks ended


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question with everything its verifier needs."""

    id: int  # row number in its source: the same in every epoch and after a resume
    data_source: str  # verl's `data_source`
    messages: tuple[dict[str, str], ...]  # chat messages, {"role": ..., "content": ...}
    token_ids: tuple[int, ...]  # chat template applied, generation prompt included
    ground_truth: Any  # verl's `reward_model.ground_truth`
    extra_info: dict[str, Any] = field(default_factory=dict)
    demonstration: str | None = None  # a known good answer, for supervised fine-tuning


@dataclass(frozen=True, slots=True)
class Response:
    """What the policy (or a demonstration) answered."""

    token_ids: tuple[int, ...]  # as sampled, never re-tokenised; the end-of-sequence token included
    log_probs: tuple[float, ...]  # log-prob of each token under the distribution it was drawn from; empty for a demonstration
    text: str  # decoded without special tokens, for verifiers and people
    finish_reason: FinishReason
    policy_version: int  # version of the weights that sampled it

    def __post_init__(self) -> None:
        if self.log_probs and len(self.log_probs) != len(self.token_ids):
            raise ValueError(f"a response of {len(self.token_ids)} tokens came with {len(self.log_probs)} log-probs; it cannot be trained on")


@dataclass(frozen=True, slots=True)
class Sample:
    """One scored response."""

    prompt: Prompt
    response: Response
    group: int  # responses to one prompt of one step share it
    reward: float  # outcome reward, paid at the last action


@dataclass(frozen=True)
class Trajectories:
    """All samples of a step, ragged. An action is a token that the policy chose."""

    tokens: Tensor  # int64 [tokens], the samples one after the other
    token_offsets: Tensor  # int64 [samples + 1] into `tokens`
    action_positions: Tensor  # int64 [actions], index into `tokens` of each action; its logits stand one position earlier
    action_offsets: Tensor  # int64 [samples + 1] into every [actions] array
    rollout_log_prob: Tensor  # float32 [actions]; zeros for demonstrations, which have none
    rewards: Tensor  # float32 [actions], at the action that each reward was paid for
    group: Tensor  # int64 [samples]
    policy_version: Tensor  # int64 [samples]

    @property
    def num_samples(self) -> int:
        return self.group.numel()

    @property
    def num_actions(self) -> int:
        return self.action_positions.numel()

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Trajectories:
        """Flattens single-turn samples: the whole response is actions and the outcome reward is paid at its last token."""
        tokens: list[int] = []
        positions: list[int] = []
        log_probs: list[float] = []
        rewards: list[float] = []
        token_offsets, action_offsets = [0], [0]
        for sample in samples:
            prompt, response = sample.prompt.token_ids, sample.response.token_ids
            if not prompt or not response:
                raise ValueError(f"prompt {sample.prompt.id}: {len(prompt)} prompt tokens and {len(response)} response tokens; both must be positive")
            first = len(tokens) + len(prompt)
            tokens += [*prompt, *response]
            positions += range(first, first + len(response))
            log_probs += sample.response.log_probs or [0.0] * len(response)
            rewards += [0.0] * (len(response) - 1) + [sample.reward]
            token_offsets.append(len(tokens))
            action_offsets.append(len(positions))
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            token_offsets=torch.tensor(token_offsets, dtype=torch.int64),
            action_positions=torch.tensor(positions, dtype=torch.int64),
            action_offsets=torch.tensor(action_offsets, dtype=torch.int64),
            rollout_log_prob=torch.tensor(log_probs, dtype=torch.float32),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group=torch.tensor([s.group for s in samples], dtype=torch.int64),
            policy_version=torch.tensor([s.response.policy_version for s in samples], dtype=torch.int64),
        )


@dataclass(frozen=True)
class Microbatch:
    """Whole sequences packed for one forward pass, before any context-parallel split. Every rank of a model replica gets the same one.

    It may hold no action at all (a filler that keeps the number of microbatches equal on every replica).
    """

    tokens: Tensor  # int64 [padded_tokens], sequences one after the other, each padded
    position_ids: Tensor  # int64 [padded_tokens], from 0 in each sequence
    cu_seqlens: Tensor  # int32 [sequences + 1], offsets of the padded sequences in `tokens`
    max_seqlen: int  # longest padded sequence
    action_rows: Tensor  # int64 [actions], row of `tokens` whose logits predict the action
    targets: Tensor  # int64 [actions], the action's token id
    action_index: Tensor  # int64 [actions], where the action stands in the [actions] arrays of its Trajectories
    action_offsets: Tensor  # int64 [samples + 1] into the [actions] arrays of this microbatch


@dataclass(frozen=True)
class PolicyStatistics:
    """What the statistics head gives for each action, float32, under the sampling temperature."""

    log_prob: Tensor  # [actions] log pi(y)
    entropy: Tensor  # [actions] -sum_v pi(v) log pi(v), in nats
    rest: Tensor  # [actions] sum over v != y of pi(v)^2

    @property
    def sum_pi_squared(self) -> Tensor:
        """[actions] sum_v pi(v)^2."""
        return torch.exp(2 * self.log_prob) + self.rest


@dataclass(frozen=True)
class LossInputs:
    """What the training step needs for each action of a microbatch, float32."""

    old_log_prob: Tensor  # [actions] under the weights before this step's first update
    advantages: Tensor  # [actions]
    weight: Tensor  # [actions] share of the action in the aggregated loss; the weights of an optimizer step sum to one times its scale
    correction: Tensor | None = None  # [actions] clipped train/rollout ratio; None where no correction is configured
    reference_log_prob: Tensor | None = None  # [actions]; None where no KL is configured
    old_values: Tensor | None = None  # [actions] of the critic before this step's first update; None where there is no critic
    returns: Tensor | None = None  # [actions] what the critic learns; None where there is no critic
