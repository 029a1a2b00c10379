"""The nouns that travel between stages. Shapes stand beside each field.

Between stages a batch is flat arrays plus offsets ("ragged") and holds action tokens only: prompt,
tool-output and padding tokens never reach an estimator. A response of one turn and one of many turns
are therefore the same thing for every algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
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
class RoutedExperts:
    """The experts that the sampler's routers chose for one response.

    There is a row for every token of prompt and response but the last, which the sampler draws and never runs. Dense layers have rows
    too, so that a layer's number finds its choice; what those hold means nothing.
    """

    dtype: Literal["uint8", "uint16"]
    shape: tuple[int, int, int]  # prompt and response tokens - 1, decoder layers, experts per token
    data: bytes  # row-major; immutable, comparable, and as small as the choices are

    @classmethod
    def of(cls, choices: np.ndarray) -> Self:
        """choices: uint8 or uint16 [tokens - 1, layers, experts per token]."""
        return cls(str(choices.dtype), choices.shape, choices.tobytes())  # type: ignore[arg-type]

    def array(self) -> np.ndarray:
        """[tokens - 1, layers, experts per token], read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Response:
    """What the policy (or a demonstration) answered."""

    token_ids: tuple[int, ...]  # as sampled, never re-tokenised; the end-of-sequence token included
    log_probs: tuple[float, ...]  # log-prob of each token under the distribution it was drawn from; empty for a demonstration
    text: str  # decoded without special tokens, for verifiers and people
    finish_reason: FinishReason
    policy_version: int  # version of the weights that sampled it
    routed_experts: RoutedExperts | None = None  # where the sampler recorded them

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
    greedy_reward: float | None = None  # of a greedy response to the same prompt; None where the estimator asks for none


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
    greedy_reward: Tensor | None = None  # float32 [samples]; None where none were sampled
    routed_experts: Tensor | None = None  # int16 [tokens, layers, experts per token], -1 where the sampler left no record; None: no record at all

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
        greedy = [s.greedy_reward for s in samples if s.greedy_reward is not None]
        if greedy and len(greedy) != len(samples):
            raise ValueError(f"{len(greedy)} of {len(samples)} samples have the reward of a greedy response; all must or none")
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            token_offsets=torch.tensor(token_offsets, dtype=torch.int64),
            action_positions=torch.tensor(positions, dtype=torch.int64),
            action_offsets=torch.tensor(action_offsets, dtype=torch.int64),
            rollout_log_prob=torch.tensor(log_probs, dtype=torch.float32),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            group=torch.tensor([s.group for s in samples], dtype=torch.int64),
            policy_version=torch.tensor([s.response.policy_version for s in samples], dtype=torch.int64),
            greedy_reward=None if not greedy else torch.tensor(greedy, dtype=torch.float32),
            routed_experts=_routed_experts(samples, token_offsets),
        )


def _routed_experts(samples: Sequence[Sample], token_offsets: list[int]) -> Tensor | None:
    """The records of all samples, -1 elsewhere: at each sample's last token, and in samples without one."""
    recorded = [sample.response.routed_experts for sample in samples]
    shapes = {record.shape[1:] for record in recorded if record is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"routed experts of different models: {sorted(shapes)} (layers, experts per token)")
    joined = torch.full((token_offsets[-1], *shapes.pop()), -1, dtype=torch.int16)
    for record, first, last in zip(recorded, token_offsets, token_offsets[1:], strict=False):
        if record is None:
            continue
        if record.shape[0] != last - first - 1:
            raise ValueError(f"a sample of {last - first} tokens came with the routed experts of {record.shape[0]}; there must be one less than tokens")
        joined[first : last - 1] = torch.from_numpy(record.array().astype(np.int16))
    return joined


@dataclass(frozen=True)
class Microbatch:
    """Whole sequences packed for one forward pass, before any context-parallel split. Every rank of a model replica gets the same one.

    It may hold no action at all (a filler that keeps the number of microbatches equal on every replica).
    """

    tokens: Tensor  # int64 [padded_tokens], sequences one after the other, each padded
    position_ids: Tensor  # int64 [padded_tokens], from 0 in each sequence
    is_padding: Tensor  # bool [padded_tokens]
    cu_seqlens: Tensor  # int32 [sequences + 1], offsets of the padded sequences in `tokens`
    max_seqlen: int  # longest padded sequence
    action_rows: Tensor  # int64 [actions], row of `tokens` whose logits predict the action
    targets: Tensor  # int64 [actions], the action's token id
    action_index: Tensor  # int64 [actions], where the action stands in the [actions] arrays of its Trajectories
    action_offsets: Tensor  # int64 [samples + 1] into the [actions] arrays of this microbatch
    routed_experts: Tensor | None = None  # int16 [padded_tokens, layers, experts per token], -1 without a record; None: no record at all


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
    """What the training step needs for each action of a microbatch, float32 where not said."""

    old_log_prob: Tensor  # [actions] under the weights before this step's first update
    advantages: Tensor  # [actions]
    weight: Tensor  # [actions] share of the action in the aggregated loss; the weights of an optimizer step sum to one times its scale, less the rejected
    correction: Tensor | None = None  # [actions] weight of the rollout correction in the policy loss; None for 1
    reference_log_prob: Tensor | None = None  # [actions]; None where no KL loss is configured
    old_values: Tensor | None = None  # [actions] of the critic before this step's first update; None where there is no critic
    returns: Tensor | None = None  # [actions] what the critic learns; None where there is no critic
    selected: Tensor | None = None  # bool [actions], the tokens that a covariance loss acts on; None for other losses
    positive: Tensor | None = None  # [actions] weight of the positive examples' likelihood; None for losses without it
