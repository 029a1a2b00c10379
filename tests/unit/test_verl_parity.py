"""OTB against verl's two functions, `compute_optimal_token_baseline_advantage` and its multi-turn form, on verl's padded layout.

The stored numbers were made by running verl 0.9.1 (Apache-2.0) on CASES in float64. With VERL_CORE_ALGOS set to the path of a
verl `core_algos.py` the same comparison runs against that file, on CASES and on random batches.
"""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from otb_megatron.algorithms import energy as energy_of
from otb_megatron.algorithms.optimal_token_baseline import optimal_token_baseline
from otb_megatron.types import PolicyStatistics

VERL_SOURCE = os.environ.get("VERL_CORE_ALGOS")


@dataclass(frozen=True)
class Case:
    """A batch by response. Each list of numbers has one entry per action."""

    group: list[int]
    probability: list[list[float]]
    rest: list[list[float]]
    reward: list[list[float]]
    correction: list[list[float]] | None
    verl: list[list[float]]  # advantages by verl


CASES = {
    "ragged groups, outcome rewards": Case(
        group=[7, 3, 7, 3, 9, 7],
        probability=[[0.5, 0.9, 0.3, 0.6], [0.2, 0.7], [0.99, 0.4, 0.8], [0.6, 0.1], [0.5, 0.5], [0.05, 0.95]],
        rest=[[0.1, 0.005, 0.2, 0.06], [0.3, 0.05], [0.00005, 0.2, 0.02], [0.08, 0.4], [0.125, 0.25], [0.4, 0.001]],
        reward=[[0.0, 0.0, 0.0, 1.0], [0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.5], [0.0, 1.0], [0.0, 1.0]],
        correction=None,
        verl=[],
    ),
    "token rewards and correction": Case(
        group=[0, 0, 0],
        probability=[[0.5, 0.25, 0.75], [0.1, 0.8, 0.6], [0.9, 0.7, 0.2]],
        rest=[[0.2, 0.3, 0.04], [0.5, 0.02, 0.1], [0.008, 0.06, 0.45]],
        reward=[[0.1, -0.2, 1.0], [0.0, 0.3, 0.0], [0.2, 0.0, -1.0]],
        correction=[[1.1, 0.7, 2.0], [1.0, 0.5, 1.3], [0.9, 1.6, 1.0]],
        verl=[],
    ),
}


def ragged(rows: list[list[float]]) -> Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def ours(case: Case) -> list[list[float]]:
    lengths = [len(row) for row in case.reward]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    log_prob, rest = ragged(case.probability).log(), ragged(case.rest)
    w = energy_of(PolicyStatistics(log_prob, torch.zeros_like(rest), rest))
    correction = None if case.correction is None else ragged(case.correction)
    flat = optimal_token_baseline(ragged(case.reward), offsets, torch.tensor(case.group), w, correction)
    return [part.tolist() for part in flat.split(lengths)]


def padded(rows: list[list[float]]) -> Tensor:
    out = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.float64)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    return out


def verl_function(name: str) -> Any:
    """The function out of verl's file, without importing verl and all that it needs."""
    tree = ast.parse(Path(str(VERL_SOURCE)).read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    function.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict}
    exec(compile(ast.Module([function], type_ignores=[]), str(VERL_SOURCE), "exec"), scope)
    return scope[name]


def by_verl(name: str, case: Case) -> list[list[float]]:
    mask = padded([[1.0] * len(row) for row in case.reward])
    probability = padded(case.probability)
    advantages, _ = verl_function(name)(
        token_level_rewards=padded(case.reward),
        response_mask=mask,
        index=np.array(case.group),
        old_log_probs=probability.clamp(min=1e-9).log(),
        sum_pi_squared=probability.square() + padded(case.rest),
        rollout_is_weights=None if case.correction is None else padded(case.correction),
    )
    return [advantages[i, : len(row)].tolist() for i, row in enumerate(case.reward)]
