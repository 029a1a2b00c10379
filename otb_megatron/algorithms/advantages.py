"""ADVANTAGES, the estimators by name, and `estimate`, which checks a batch and applies one."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from otb_megatron.algorithms.group_baselines import (
    gpg,
    grpo,
    grpo_passk,
    opo,
    optimal_global_baseline,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
from otb_megatron.algorithms.optimal_token_baseline import optimal_token_baseline, optimal_token_baseline_loo
from otb_megatron.algorithms.options import check_required, choose
from otb_megatron.algorithms.token_returns import gae, gae_length_adaptive, reinforce_plus_plus
from otb_megatron.types import UserError


@dataclass(frozen=True)
class Estimator:
    """An advantage estimator. Its options are the keyword-only parameters of `function`."""

    function: Callable[..., Tensor]
    required: frozenset[str] = frozenset()  # fields of AdvantageInputs beyond rewards, offsets and group that it cannot do without
    min_group: int = 1  # smallest rollout.n that makes sense: below it the baseline is gone


_OTB = Estimator(optimal_token_baseline, frozenset({"energy"}), min_group=2)
_GRPO = Estimator(grpo, min_group=2)
_RLOO = Estimator(rloo, min_group=2)

ADVANTAGES: dict[str, Estimator] = {
    "optimal_token_baseline": _OTB,
    "tir_optimal_token_baseline": _OTB,  # verl's multi-turn form: the same function on action-only data
    "optimal_token_baseline_loo": Estimator(optimal_token_baseline_loo, frozenset({"energy"}), min_group=2),
    "optimal_global_baseline": Estimator(optimal_global_baseline, frozenset({"energy"}), min_group=2),
    "opo": Estimator(opo, min_group=2),
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": Estimator(grpo_passk, min_group=2),
    "rloo": _RLOO,
    "rloo_vectorized": _RLOO,
    "gpg": Estimator(gpg, min_group=2),
    "remax": Estimator(remax, frozenset({"greedy_reward"})),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus),
    "reinforce_plus_plus_baseline": Estimator(reinforce_plus_plus_baseline, min_group=2),
    "gae": Estimator(gae, frozenset({"values"})),
    "gae_length_adaptive": Estimator(gae_length_adaptive, frozenset({"values"})),
}

_PROVIDED_BY = {
    "energy": "the statistics pass computes it (`rest` must be among the statistics that it returns)",
    "values": "a critic provides it, which `train` has by itself under this estimator (the section `critic` says how it is trained), and here is none",
    "greedy_reward": "the reward of a greedy response to each prompt provides it, and these samples were recorded without; record them with the same estimator",
}


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may use of a batch. Floating-point fields are float32 or float64."""

    rewards: Tensor  # [actions], each at the action that it was paid for
    offsets: Tensor  # int64 [samples + 1]
    group: Tensor  # int64 [samples]
    energy: Tensor | None = None  # [actions]
    correction: Tensor | None = None  # [actions], weights of the rollout correction, 0 where rejected
    values: Tensor | None = None  # [actions], the critic's estimate of the return before the action
    greedy_reward: Tensor | None = None  # [samples], reward of a greedy response to the sample's prompt


def needs_critic(name: str) -> bool:
    """Whether the estimator `name` requires values, which a critic provides; False for an unknown name."""
    return name in ADVANTAGES and "values" in ADVANTAGES[name].required


def check_fields(name: str, available: Collection[str]) -> None:
    """Raises a UserError that names each field which the estimator `name` requires and which is not `available`, and what would provide it."""
    check_required("advantage", name, choose("advantage", name, ADVANTAGES).required, available, _PROVIDED_BY)


def estimate(name: str, inputs: AdvantageInputs, options: Mapping[str, Any]) -> Tensor:
    """Checks `inputs` and applies the estimator `name` to them.

    Args:
        name: a key of ADVANTAGES.
        inputs: the batch.
        options: keyword arguments of the estimator, checked before by `check_options`.

    Returns:
        [actions], the dtype of the rewards.

    Raises:
        UserError: a required field is missing, or a reward or a correction weight is not a usable number.
        ValueError: lengths of the fields contradict each other.
    """
    estimator = choose("advantage", name, ADVANTAGES)
    fields = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs) if getattr(inputs, f.name) is not None}
    check_fields(name, fields)
    _check_lengths(fields)
    _check_values(fields)
    accepted = inspect.signature(estimator.function).parameters
    return estimator.function(**{field: value for field, value in fields.items() if field in accepted}, **options)


def _check_lengths(fields: Mapping[str, Tensor]) -> None:
    offsets, num_actions, num_samples = fields["offsets"], fields["rewards"].numel(), fields["offsets"].numel() - 1
    if num_samples < 0 or int(offsets[0]) != 0 or int(offsets[-1]) != num_actions or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must rise from 0 to the {num_actions} actions of `rewards`; they are {offsets.tolist()[:3]} ... {offsets.tolist()[-3:]}")
    for field, value in fields.items():
        expected = num_samples if field in ("group", "greedy_reward") else num_actions
        if field != "offsets" and value.shape != (expected,):
            raise ValueError(f"`{field}` has shape {tuple(value.shape)}, but {num_samples} samples with {num_actions} actions ask for ({expected},)")


def _check_values(fields: Mapping[str, Tensor]) -> None:
    """Refuses numbers that would reach every advantage of a group."""
    remedies = {
        "rewards": "the reward function must return a finite number",
        "greedy_reward": "the reward function must return a finite number",
        "correction": "correction weights must be finite and not negative; compare the log-probs of trainer and rollout",
        "energy": "energies must be finite and not negative; the policy's log-probs are broken",
        "values": "the critic must return finite numbers",
    }
    for field, remedy in remedies.items():
        if field not in fields or fields[field].numel() == 0:
            continue
        value = fields[field]
        low, high = torch.aminmax(value)  # one pass; NaN comes through
        may_be_negative = field not in ("correction", "energy")
        if bool(torch.isfinite(low) & torch.isfinite(high) & (may_be_negative | (low >= 0))):
            continue
        bad = ~torch.isfinite(value) | ((value < 0) & (not may_be_negative))
        place = int(bad.nonzero()[0])
        sample = place if field == "greedy_reward" else int(torch.searchsorted(fields["offsets"], torch.tensor(place, device=value.device), right=True)) - 1
        group = int(fields["group"][sample])
        raise UserError(f"{field} of sample {sample} (prompt group {group}) is {float(value[place])}, one of {int(bad.sum())} such values: {remedy}")
