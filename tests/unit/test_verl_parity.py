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
        verl=[
            [9.0769e-05, 0.251058874, 0.370205657, 1.0],
            [0.101694923, 0.286561268],
            [-0.999909231, -0.748941126, -0.629794343],
            [-0.398305077, -0.213438732],
            [1.0, 1.0],
            [9.0769e-05, 0.251058874],
        ],
    ),
    "token rewards and correction": Case(
        group=[0, 0, 0],
        probability=[[0.5, 0.25, 0.75], [0.1, 0.8, 0.6], [0.9, 0.7, 0.2]],
        rest=[[0.2, 0.3, 0.04], [0.5, 0.02, 0.1], [0.008, 0.06, 0.45]],
        reward=[[0.1, -0.2, 1.0], [0.0, 0.3, 0.0], [0.2, 0.0, -1.0]],
        correction=[[1.1, 0.7, 2.0], [1.0, 0.5, 1.3], [0.9, 1.6, 1.0]],
        verl=[
            [0.433788818, 0.512855925, 1.024071808],
            [-0.166211182, 0.012855925, 0.024071808],
            [-1.266211182, -1.287144075, -0.975928192],
        ],
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
        epsilon=1e-30,  # verl's default of 1e-8 pulls baselines of small energies towards 0
    )
    return [advantages[i, : len(row)].tolist() for i, row in enumerate(case.reward)]


def assert_close(actual: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    assert [len(row) for row in actual] == [len(row) for row in expected]
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_equals_what_verl_gave(name):
    """To 2e-8: verl adds 1e-8 to its denominator, and the stored numbers have nine digits."""
    assert_close(ours(CASES[name]), CASES[name].verl, 2e-8)


def test_energies_that_cancel_in_verl():
    """pi = 1 - 1e-5 and 1 - 3e-5 with the remaining mass on one token: w = 2 (1 - pi)^2 = 2e-10 and 1.8e-9, B = 2e-10 / 2e-9 = 0.1.

    verl 0.9.1 gives advantages (1, 0) in float32: 1 - 2 pi + sum pi^2 rounds to 0 for both, and the group loses its baseline.
    """
    one_minus_pi = torch.tensor([1e-5, 3e-5])
    w = energy_of(PolicyStatistics(torch.log1p(-one_minus_pi), torch.zeros(2), one_minus_pi.square()))
    advantages = optimal_token_baseline(torch.tensor([1.0, 0.0]), torch.tensor([0, 1, 2]), torch.tensor([0, 0]), w)
    torch.testing.assert_close(advantages, torch.tensor([0.9, -0.1]), rtol=0, atol=1e-3)  # 1e-3: float32 log-probs of this size carry 0.3 %


def test_tail_of_a_response_with_gaps():
    """Response 0 acts at positions 0, 2, 3 (a tool answered at 1), response 1 at 0 and 1; all w = 0.5, response 0 earns 1 at its end.

    Step by step both are alive for two actions: B_1 = B_2 = 0.5, and the third has no peer. verl 0.9.1's single-turn function gives
    (0.5, 1, 1) for response 0: it compares positions, and counts two actions of response 1 as the first two positions.
    Its multi-turn function gives (0.5, 0.5, 1), like ours.
    """
    half = torch.full((5,), 0.5)
    advantages = optimal_token_baseline(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 3, 5]), torch.tensor([0, 0]), half)
    torch.testing.assert_close(advantages, torch.tensor([0.5, 0.5, 1.0, -0.5, -0.5]))


if VERL_SOURCE:  # not a skip: without verl's file there is nothing to collect

    @pytest.mark.parametrize("function", ["compute_optimal_token_baseline_advantage", "compute_multi_turn_optimal_token_baseline_advantage"])
    def test_equals_the_given_verl_file(function):
        """CASES, and random batches of 12 responses."""
        rng = np.random.default_rng(0)
        for case in [*CASES.values(), *(random_case(rng) for _ in range(20))]:
            assert_close(by_verl(function, case), ours(case), 1e-12)


def random_case(rng: np.random.Generator) -> Case:
    lengths = rng.integers(1, 30, size=12)
    probability = [rng.uniform(0.05, 0.95, n).tolist() for n in lengths]
    rest = [[(1 - p) ** 2 * rng.uniform(0.1, 1) for p in row] for row in probability]
    reward = [rng.normal(size=n).tolist() for n in lengths]
    return Case(rng.integers(0, 4, size=12).tolist(), probability, rest, reward, [rng.uniform(0.5, 2, n).tolist() for n in lengths], [])
