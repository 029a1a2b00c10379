"""Variance, signal and bias of estimators from inner products of scores, against exact enumeration of a small world."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from otb_megatron.algorithms import AdvantageInputs, estimate
from otb_megatron.algorithms.gradient_variance import GroupMoments, coefficients, draw_partitions, group_moments
from otb_megatron.algorithms.jackknife import jackknife
from tests.unit.test_unbiasedness import World, make_world

UNBIASED = "optimal_token_baseline_loo"
ESTIMATORS = ["optimal_token_baseline", UNBIASED, "optimal_global_baseline", "opo", "grpo", "rloo", "grpo_passk"]


@dataclass(frozen=True)
class Exact:
    mean: Tensor  # [parameters], E h
    variance: float


def exact(world: World, name: str, group_size: int) -> Exact:
    """Every group of independent trajectories with its probability."""
    members = torch.cartesian_prod(*[torch.arange(len(world.lengths))] * group_size).view(-1, group_size)
    weight = world.probability[members].prod(1)
    advantages = estimate(name, _inputs(world, members.flatten(), torch.arange(len(members)).repeat_interleave(group_size)), {})
    placed = torch.zeros(members.numel(), world.rewards.size(1), dtype=torch.float64)
    placed[world.alive[members.flatten()]] = advantages / group_size
    gradients = torch.einsum("gt,gtp->gp", placed, world.scores[members.flatten()]).view(len(members), group_size, -1).sum(1)
    mean = weight @ gradients
    return Exact(mean, float(weight @ gradients.square().sum(1) - mean.square().sum()))


def _inputs(world: World, sample: Tensor, group: Tensor) -> AdvantageInputs:
    alive = world.alive[sample]
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), world.lengths[sample].cumsum(0)))
    return AdvantageInputs(world.rewards[sample][alive], offsets, group, energy=world.energy[sample][alive])


def measure(world: World, names: list[str], group_size: int, *, num_prompts: int, num_responses: int, seed: int) -> dict[str, GroupMoments]:
    """What the tool does: responses drawn from the world in place of a model, every prompt the same world."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.multinomial(world.probability, num_prompts * num_responses, replacement=True, generator=generator)
    group = torch.arange(num_prompts).repeat_interleave(num_responses)
    inputs = _inputs(world, sample, group)
    scores = world.scores[sample][world.alive[sample]]
    prompt_of_action = group.repeat_interleave(world.lengths[sample])
    grams = [of_prompt @ of_prompt.t() for of_prompt in (scores[prompt_of_action == prompt] for prompt in range(num_prompts))]
    partitions = draw_partitions(group, group_size, 2, generator)
    found = {name: coefficients(name, inputs, partitions, {}) for name in dict.fromkeys([*names, UNBIASED])}
    return {name: group_moments(found[name], found[UNBIASED], grams) for name in names}


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_estimates_are_unbiased(group_size: int) -> None:
    """Mean over 1000 prompts of 7 responses (one is left over at N = 2, and at N = 3) within four standard errors of the enumerated values."""
    world = make_world(3, token_rewards=False)
    true = {name: exact(world, name, group_size) for name in ESTIMATORS}
    unbiased = true[UNBIASED].mean
    for name, moments in measure(world, ESTIMATORS, group_size, num_prompts=1000, num_responses=7, seed=1).items():
        mean = true[name].mean
        expected = GroupMoments(
            *(torch.as_tensor(x) for x in (true[name].variance, mean @ mean, mean @ unbiased, unbiased @ unbiased, (mean - unbiased).square().sum()))
        )
        for field, value in vars(moments).items():
            error = value.std() / value.numel() ** 0.5
            assert abs(value.mean() - getattr(expected, field)) < 4 * error + 1e-12, (name, field)


def test_the_interval_contains_the_enumerated_variance_as_often_as_it_says() -> None:
    """50 experiments of 12 prompts with 6 responses: a 95 % interval holds the true variance in 43 to 50 of them, for each estimator."""
    world = make_world(3, token_rewards=False)
    names = ["optimal_token_baseline", "rloo", "grpo"]
    true = {name: exact(world, name, 2).variance for name in names}
    covered = dict.fromkeys(names, 0)
    for experiment in range(50):
        for name, moments in measure(world, names, 2, num_prompts=12, num_responses=6, seed=experiment).items():
            interval = jackknife(lambda kept, v=moments.variance: float(v[kept].mean()), 12, positive=True)
            covered[name] += interval.low <= true[name] <= interval.high
    assert all(43 <= count <= 50 for count in covered.values()), covered


def test_the_unbiased_estimator_has_no_bias_and_its_mean_is_the_gradient() -> None:
    world = make_world(3, token_rewards=True)
    torch.testing.assert_close(exact(world, UNBIASED, 2).mean, world.gradient, rtol=0, atol=1e-10)
    assert measure(world, [UNBIASED], 2, num_prompts=3, num_responses=6, seed=0)[UNBIASED].bias.abs().max() == 0


def test_moments_by_hand() -> None:
    """One prompt, four one-action responses in groups of two, scores along one axis 1, 2, 3, 4, coefficients 1/2.

    Groups (1, 2) and (3, 4): h = 1.5 and 3.5, variance (3.5 - 1.5)^2 / 2 = 2, signal 1.5 x 3.5 = 5.25. Against coefficients of 1 on the
    first of each pair (u = 1 and 3): inner product (1.5 x 3 + 3.5 x 1) / 2 = 4, signal 3, bias 0.5 x 0.5 = 0.25.
    """
    scores = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    own = torch.tensor([[[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]], dtype=torch.float64)
    reference = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 1.0, 0]]], dtype=torch.float64)
    moments = group_moments(own, reference, [scores @ scores.t()])
    assert {name: value.item() for name, value in vars(moments).items()} == pytest.approx(
        {"variance": 2.0, "signal": 5.25, "inner": 4.0, "unbiased_signal": 3.0, "bias": 0.25}
    )


def test_partitions_share_no_response_and_stay_within_prompts() -> None:
    """Prompts with 7 and 9 responses, interleaved: three groups of two of each."""
    group = torch.tensor([5, 8] * 7 + [8, 8])
    partitions = draw_partitions(group, 2, 10, torch.Generator().manual_seed(0))
    assert partitions.shape == (10, 3, 2, 2)
    for partition in partitions:
        assert partition.unique().numel() == 12
        assert (group[partition[:, 0]] == 5).all() and (group[partition[:, 1]] == 8).all()
    assert len({tuple(partition.flatten().tolist()) for partition in partitions}) == 10
    with pytest.raises(ValueError, match="groups of 4 need 8 responses"):
        draw_partitions(group, 4, 1, torch.Generator())


def test_coefficients_are_advantages_over_n_of_the_batch_alone() -> None:
    """RLOO at N = 2: rewards 1, 0, 4 and the pair (0, 2): advantages 1 - 4 and 4 - 1, halved; response 1 takes no part.

    `gpg` scales by the batch: both groups differ, so alpha is 1, and its advantages are half of RLOO's.
    """
    inputs = AdvantageInputs(torch.tensor([0.0, 1.0, 0.0, 4.0, 3.0, 5.0]), torch.tensor([0, 2, 3, 4, 5, 6]), torch.tensor([0, 0, 0, 1, 1]))
    partitions = torch.tensor([[[[0, 2], [3, 4]]]])
    assert coefficients("rloo", inputs, partitions, {}).flatten().tolist() == [-1.5, -1.5, 0.0, 1.5, -1.0, 1.0]
    assert coefficients("gpg", inputs, partitions, {}).flatten().tolist() == [-0.75, -0.75, 0.0, 0.75, -0.5, 0.5]
