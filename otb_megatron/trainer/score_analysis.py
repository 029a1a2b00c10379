"""From the scores of a model's responses to what `diagnose variance` says of estimators and of the energy. Runs on the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otb_megatron.algorithms import ADVANTAGES, AdvantageInputs, energy
from otb_megatron.algorithms.advantages import Estimator
from otb_megatron.algorithms.gradient_variance import GroupMoments, coefficients, draw_partitions, group_moments
from otb_megatron.algorithms.jackknife import Interval, jackknife
from otb_megatron.algorithms.proxy_fit import rank_correlation, ratio_quantiles
from otb_megatron.algorithms.ragged import prefix_sums, sample_of_action
from otb_megatron.config import AlgorithmConfig, DiagnoseConfig
from otb_megatron.types import PolicyStatistics, Trajectories

OTB, UNBIASED, REFERENCE = "optimal_token_baseline", "optimal_token_baseline_loo", "rloo"
TRUE_ENERGY = "optimal_token_baseline_true_energy"  # OTB with |s_t|^2 in place of its proxy w_t: what the proxy costs
ALL_KINDS = "all"

Numbers = list[float | None]


@dataclass(frozen=True)
class PromptScores:
    """Of the responses to one prompt, one after the other."""

    statistics: PolicyStatistics  # [actions]
    squared_norm: Tensor  # float64 [kinds, actions]
    cumulative_squared_norm: Tensor  # float64 [kinds, actions]
    gram: Tensor  # float64 [actions, actions], inner products of the scores (of their sketches)


@dataclass(frozen=True)
class ScoredResponses:
    """All of it joined; actions in the order of the Trajectories, prompts in the order of the actions."""

    trajectories: Trajectories
    log_prob: Tensor  # [actions]
    energy: Tensor  # [actions], w_t
    squared_norm: Tensor  # float64 [kinds + 1, actions]; the last row is the sum over kinds
    cumulative_squared_norm: Tensor  # the same of sum_{j <= t} s_j
    kinds: tuple[str, ...]  # with ALL_KINDS at the end
    grams: list[Tensor]  # [prompt] -> [its actions, its actions]

    @classmethod
    def of(cls, trajectories: Trajectories, kinds: tuple[str, ...], prompts: Sequence[PromptScores]) -> ScoredResponses:
        statistics = PolicyStatistics(*(torch.cat([getattr(p.statistics, name) for p in prompts]) for name in ("log_prob", "entropy", "rest")))
        token, cumulative = (torch.cat([getattr(p, name) for p in prompts], 1) for name in ("squared_norm", "cumulative_squared_norm"))
        token, cumulative = (torch.cat((norms, norms.sum(0, keepdim=True))) for norms in (token, cumulative))
        return cls(trajectories, statistics.log_prob, energy(statistics), token, cumulative, (*kinds, ALL_KINDS), [p.gram for p in prompts])

    @property
    def cumulative_energy(self) -> Tensor:
        """float64 [actions], W_t."""
        return prefix_sums(self.energy.double(), self.trajectories.action_offsets)

    @property
    def prompt_of_action(self) -> np.ndarray:
        """int64 [actions], from 0."""
        return np.repeat(np.arange(len(self.grams)), [len(gram) for gram in self.grams])

    @property
    def sketch_error(self) -> float:
        """Root mean square of the relative error of the sketches' squared norms."""
        from_sketch, true = torch.cat([gram.diagonal() for gram in self.grams]), self.squared_norm[-1]
        used = true > 0
        return float((from_sketch[used] / true[used] - 1).square().mean().sqrt())


def estimator_table(responses: ScoredResponses, settings: DiagnoseConfig, algorithm: AlgorithmConfig, seed: int) -> dict[str, dict[str, dict[str, Numbers]]]:
    """Estimator -> group size -> quantity -> [estimate, low, high]; null where the data do not determine it."""
    inputs = AdvantageInputs(
        responses.trajectories.rewards.double(), responses.trajectories.action_offsets, responses.trajectories.group, energy=responses.energy.double()
    )
    with_true_energy = AdvantageInputs(inputs.rewards, inputs.offsets, inputs.group, energy=responses.squared_norm[-1])
    configured = ADVANTAGES[algorithm.advantage]

    def options(estimator: Estimator) -> Mapping[str, Any]:
        return algorithm.advantage_options if estimator is configured else {}

    table: dict[str, dict[str, dict[str, Numbers]]] = {}
    for size in settings.group_sizes:
        partitions = draw_partitions(inputs.group, size, settings.num_partitions, torch.Generator().manual_seed(seed))
        found = {name: coefficients(name, inputs, partitions, options(estimator)) for name, estimator in measurable_estimators().items()}
        found[TRUE_ENERGY] = coefficients(OTB, with_true_energy, partitions, options(ADVANTAGES[OTB]))
        moments = {name: group_moments(own, found[UNBIASED], responses.grams) for name, own in found.items()}
        for name, own in moments.items():
            table.setdefault(name, {})[str(size)] = _quantities(own, moments[REFERENCE])
    return table


def measurable_estimators() -> dict[str, Estimator]:
    """Those that need nothing but rewards and energies, each under its first name."""
    chosen: dict[str, Estimator] = {}
    for name, estimator in ADVANTAGES.items():
        if estimator.required <= {"energy"} and estimator not in chosen.values():
            chosen[name] = estimator
    return chosen


def _quantities(own: GroupMoments, reference: GroupMoments) -> dict[str, Numbers]:
    """docs/diagnose.md defines them."""
    num_prompts = own.variance.numel()

    def mean(values: Tensor, kept: Tensor) -> float:
        return float(values[kept].mean())

    def relative_variance(moments: GroupMoments, kept: Tensor) -> float:
        return _ratio(mean(moments.variance, kept), mean(moments.signal, kept))

    def cosine(kept: Tensor) -> float:
        product = mean(own.signal, kept) * mean(own.unbiased_signal, kept)
        return _ratio(mean(own.inner, kept), math.sqrt(product)) if product > 0 else math.nan

    return {
        "variance": _numbers(jackknife(lambda kept: mean(own.variance, kept), num_prompts, positive=True)),
        "relative_variance": _numbers(jackknife(lambda kept: relative_variance(own, kept), num_prompts, positive=True)),
        "relative_to_rloo": _numbers(
            jackknife(lambda kept: _ratio(relative_variance(own, kept), relative_variance(reference, kept)), num_prompts, positive=True)
        ),
        "relative_bias_squared": _numbers(jackknife(lambda kept: _ratio(mean(own.bias, kept), mean(own.unbiased_signal, kept)), num_prompts)),
        "scale": _numbers(jackknife(lambda kept: _ratio(mean(own.inner, kept), mean(own.unbiased_signal, kept)), num_prompts)),
        "cosine": _numbers(_clipped(jackknife(cosine, num_prompts))),
    }


def energy_table(responses: ScoredResponses) -> dict[str, dict[str, dict[str, Any]]]:
    """ "token" and "cumulative" -> kind of layer -> rank correlations with intervals, quantiles of the ratio, share of the squared norm."""
    offsets = responses.trajectories.action_offsets
    step = (torch.arange(responses.energy.numel()) - offsets[sample_of_action(offsets)]).numpy()
    prompt = responses.prompt_of_action
    cell = prompt * (int(step.max()) + 1) + step
    table: dict[str, dict[str, dict[str, Any]]] = {}
    for level, proxy, norms in (
        ("token", responses.energy.double(), responses.squared_norm),
        ("cumulative", responses.cumulative_energy, responses.cumulative_squared_norm),
    ):
        of_kind = {kind: _fit(norm.numpy(), proxy.numpy(), prompt, cell) for kind, norm in zip(responses.kinds, norms, strict=True)}
        total = float(norms[-1].sum())
        table[level] = {kind: fit | {"share": _number(_ratio(float(norm.sum()), total))} for (kind, fit), norm in zip(of_kind.items(), norms, strict=True)}
    return table


def _fit(true: np.ndarray, proxy: np.ndarray, prompt: np.ndarray, cell: np.ndarray) -> dict[str, Any]:
    def correlation(kept: Tensor, within: bool) -> float:
        used = np.isin(prompt, kept.numpy())
        return rank_correlation(true[used], proxy[used], cell[used] if within else None)

    num_prompts = int(prompt.max()) + 1
    return {
        "rank_correlation": _numbers(_clipped(jackknife(lambda kept: correlation(kept, False), num_prompts))),
        "rank_correlation_within_step": _numbers(_clipped(jackknife(lambda kept: correlation(kept, True), num_prompts))),
        "ratio_quantiles": [_number(value) for value in ratio_quantiles(true, proxy)],
    }


def _ratio(numerator: float, denominator: float) -> float:
    """NaN where an estimate of something positive came out otherwise, so that there is no ratio to speak of."""
    return numerator / denominator if denominator > 0 else math.nan


def _clipped(interval: Interval) -> Interval:
    """Of a correlation or a cosine, which lie between -1 and 1."""
    return Interval(*(min(max(value, -1.0), 1.0) if math.isfinite(value) else value for value in (interval.estimate, interval.low, interval.high)))


def _numbers(interval: Interval) -> Numbers:
    return [_number(value) for value in (interval.estimate, interval.low, interval.high)]


def _number(value: float) -> float | None:
    """Six digits are more than any of these is known to; JSON has no NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
