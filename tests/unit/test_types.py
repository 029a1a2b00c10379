"""Flattening samples into trajectories, on two samples worked out by hand."""

from __future__ import annotations

import pytest

from otb_megatron.types import Prompt, Response, Sample, Trajectories


def _sample(prompt: tuple[int, ...], response: tuple[int, ...], group: int, reward: float, log_probs: tuple[float, ...] = ()) -> Sample:
    return Sample(Prompt(0, "test", (), prompt, ""), Response(response, log_probs, "", "stop", 7), group, reward)


def test_flattened_by_hand() -> None:
    trajectories = Trajectories.from_samples([_sample((5, 6), (7, 8, 9), 3, 1.0, (-0.1, -0.2, -0.3)), _sample((4,), (2,), 1, 0.5)])
    assert trajectories.tokens.tolist() == [5, 6, 7, 8, 9, 4, 2]
    assert trajectories.token_offsets.tolist() == [0, 5, 7]
    assert trajectories.action_positions.tolist() == [2, 3, 4, 6]
    assert trajectories.action_offsets.tolist() == [0, 3, 4]
    assert trajectories.rewards.tolist() == [0, 0, 1, 0.5]
    assert trajectories.rollout_log_prob.tolist() == pytest.approx([-0.1, -0.2, -0.3, 0])
    assert trajectories.group.tolist() == [3, 1]
    assert trajectories.policy_version.tolist() == [7, 7]
    assert (trajectories.num_samples, trajectories.num_actions) == (2, 4)


def test_missing_log_probs_are_never_filled() -> None:
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        Response((1, 2), (-0.5,), "", "stop", 0)


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompt tokens and 0 response tokens"):
        Trajectories.from_samples([_sample((5, 6), (), 0, 1.0)])
