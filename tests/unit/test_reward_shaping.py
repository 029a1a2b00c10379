"""Which KL coefficient a resumed run starts from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from otb_megatron.config import validate
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.reward_shaping import RewardShaping
from otb_megatron.types import Prompt, Response, Sample, Trajectories

ADAPTIVE = {"target": 0.5, "horizon": 10.0}


def _shaping(reward_kl: dict[str, Any] | None) -> RewardShaping:
    return RewardShaping(validate({"model": {"path": "unused"}, "data": {"train": {"path": "unused"}}, "algorithm": {"reward_kl": reward_kl}}, "test"))


def _step(shaping: RewardShaping) -> float:
    """Makes a step of one sample with a KL of 1 nat, twice the target, and returns the coefficient it used."""
    trajectories = Trajectories.from_samples([Sample(Prompt(0, "test", (), (4,), ""), Response((5,), (-1.0,), "", "stop", 0), 0, 1.0)])
    metrics = Metrics()
    shaping.apply(trajectories, torch.tensor([-1.0]), torch.tensor([-2.0]), metrics)
    return metrics.values()["rewards/kl_coef"]


@pytest.mark.parametrize(
    ("earlier", "now", "expected"),
    [
        ({"coef": 0.1, "adaptive": ADAPTIVE}, {"coef": 0.3, "adaptive": ADAPTIVE}, 0.1 * (1 + 0.2 / 10)),
        ({"coef": 0.1}, {"coef": 0.3, "adaptive": ADAPTIVE}, 0.3),
        ({"coef": 0.1, "adaptive": ADAPTIVE}, {"coef": 0.3}, 0.3),
    ],
)
def test_only_a_controller_continues_a_controller(earlier: dict[str, Any], now: dict[str, Any], expected: float) -> None:
    """After one step of one sample at the clipped error 0.2 and a horizon of 10, an adaptive coefficient stands at 1.02 of its start."""
    before, after = _shaping(earlier), _shaping(now)
    _step(before)
    after.load_state_dict(before.state_dict())
    assert _step(after) == pytest.approx(expected)


def test_a_run_without_kl_leaves_nothing_to_continue() -> None:
    shaping = _shaping({"coef": 0.3, "adaptive": ADAPTIVE})
    shaping.load_state_dict(_shaping(None).state_dict())
    assert _step(shaping) == pytest.approx(0.3)
