"""Flattening samples into trajectories, on two samples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from otb_megatron.types import Prompt, Response, RoutedExperts, Sample, Trajectories


def _sample(
    prompt: tuple[int, ...], response: tuple[int, ...], group: int, reward: float, log_probs: tuple[float, ...] = (), experts: RoutedExperts | None = None
) -> Sample:
    return Sample(Prompt(0, "test", (), prompt, ""), Response(response, log_probs, "", "stop", 7, experts), group, reward)


def _experts(num_rows: int, layers: int = 1) -> RoutedExperts:
    """Row r of layer l chose experts 10 r + l and 200."""
    rows, numbers = np.arange(num_rows)[:, None], np.arange(layers)[None]
    return RoutedExperts.of(np.stack([10 * rows + numbers, np.full((num_rows, layers), 200)], axis=-1).astype(np.uint8))


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


def test_routed_experts_stand_beside_their_tokens() -> None:
    """-1 at each sample's last token, which no engine ran, and for a sample without a record."""
    trajectories = Trajectories.from_samples(
        [_sample((5, 6), (7,), 0, 0.0, experts=_experts(2)), _sample((4,), (2,), 1, 0.5), _sample((4,), (3,), 1, 0.5, experts=_experts(1))]
    )
    assert trajectories.routed_experts is not None
    assert trajectories.routed_experts.tolist() == [[[0, 200]], [[10, 200]], [[-1, -1]], [[-1, -1]], [[-1, -1]], [[0, 200]], [[-1, -1]]]
    assert Trajectories.from_samples([_sample((4,), (2,), 1, 0.5)]).routed_experts is None


def test_routed_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a sample of 3 tokens came with the routed experts of 3; there must be one less"):
        Trajectories.from_samples([_sample((5, 6), (7,), 0, 0.0, experts=_experts(3))])
    with pytest.raises(ValueError, match=r"different models: \[\(1, 2\), \(3, 2\)\]"):
        Trajectories.from_samples([_sample((5,), (7,), 0, 0.0, experts=_experts(1)), _sample((5,), (7,), 0, 0.0, experts=_experts(1, layers=3))])


def test_missing_log_probs_are_never_filled() -> None:
    with pytest.raises(ValueError, match="2 tokens came with 1 log-probs"):
        Response((1, 2), (-0.5,), "", "stop", 0)


def test_an_empty_response_is_refused() -> None:
    with pytest.raises(ValueError, match="2 prompt tokens and 0 response tokens"):
        Trajectories.from_samples([_sample((5, 6), (), 0, 1.0)])
