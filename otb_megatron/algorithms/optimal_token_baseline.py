"""The Optimal Token Baseline (arXiv 2602.07078): one baseline per prompt group and action step."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from otb_megatron.algorithms.options import Fraction, NonNegative
from otb_megatron.algorithms.ragged import Groups, discounted_suffix_sums, prefix_sums, sample_of_action

Tail = Literal["zero", "mean", "hold"]

# From this many actions the compiled form is used on CPU tensors. Loading numba costs a process about a second and the first compilation on a
# machine several more, which a short run of small batches never earns back: the tensor form takes 0.1 s at this size, leave-one-out 0.4 s.
_COMPILED_FROM_ACTIONS = 2**18


def optimal_token_baseline(
    rewards: Tensor,
    offsets: Tensor,
    group: Tensor,
    energy: Tensor,
    correction: Tensor | None = None,
    *,
    discount: Fraction = 1.0,
    tail: Tail = "zero",
    energy_floor: NonNegative = 1e-10,
) -> Tensor:
    """Advantages under the baseline that minimises the variance of each step's gradient term.

        G_t = sum_{k >= t} discount^(k - t) r_k
        W_t = sum_{j <= t} rho_j^2 w_j
        B_t = sum_i G_t^i W_t^i / sum_i W_t^i        over the group's responses that are alive at step t
        A_t = G_t - B_t

    arXiv 2602.07078; W_t is its realized energy, and rho enters it as in its appendix and in verl. A response is alive at
    step t while it has a t-th action; steps count actions, so a trajectory of many turns is aligned like one of a single turn.

    Departures from the paper:
    - Where the mean of the live W_t is below `energy_floor` * t, the shortfall is added to each of them. The weights then
      become equal, and B_t the plain mean of the live G_t, continuously as the energies vanish. The quotient of
      near-deterministic tokens' energies is rounding noise otherwise.
    - Where exactly one response is alive, its own return would be the baseline and its advantage 0. `tail` decides:
      "zero" uses no baseline there (verl's rule), "mean" the group's mean return G_1, "hold" the last B_t that was shared.
    - A group of one response has no baseline: advantage = return, as in verl.

    Example (one group): response 0 has energies (0.5, 1.0) and reward 1 at its second action, response 1 has energy (1.5,)
    and reward 0. At t = 1, G = (1, 0) and W = (0.5, 1.5), so B_1 = 0.5 / 2 = 0.25; at t = 2 response 0 is alone. The
    advantages are (0.75, 1.0) and (-0.25,) under "zero"; the 1.0 becomes 0.5 under "mean" and 0.75 under "hold".

    Args:
        rewards: [actions], each at the action that it was paid for.
        offsets: [samples + 1], where each sample starts in the [actions] arrays.
        group: [samples], any integer ids; members may be interleaved, groups may differ in size.
        energy: [actions], w.
        correction: [actions], rho, the clipped train/rollout ratio; None for 1.

    Returns:
        [actions], the dtype of `rewards`; computed in float64.
    """
    form = _compiled().advantages if _is_large(rewards) else tensor_form
    return form(rewards, offsets, group, energy, correction, discount, tail, energy_floor)


def optimal_token_baseline_loo(
    rewards: Tensor,
    offsets: Tensor,
    group: Tensor,
    energy: Tensor,
    correction: Tensor | None = None,
    *,
    discount: Fraction = 1.0,
    tail: Tail = "zero",
    energy_floor: NonNegative = 1e-10,
) -> Tensor:
    """`optimal_token_baseline` with B_t for response i taken from the group's other responses only (leave one out).

        B_t^i = sum_{k != i} G_t^k W_t^k / sum_{k != i} W_t^k      over the other responses that are alive at step t

    B_t^i does not depend on response i, so the gradient estimate is unbiased for any group size, where the plain form has a
    bias of order 1 / N. The floor applies to the others' mean energy; for `tail`, "mean" is the mean G_1 of the others and
    "hold" the last B_t^i. This form is ours, after RLOO (arXiv 2402.14740).

    Example (one group, one action each): energies 1, 2, 3 and rewards 1, 0, 1. B^0 = (2 * 0 + 3 * 1) / 5 = 0.6,
    B^1 = (1 + 3) / 4 = 1, B^2 = 1 / 3; advantages 0.4, -1, 2 / 3.

    Arguments and result are those of `optimal_token_baseline`.
    """
    form = _compiled().advantages_loo if _is_large(rewards) else tensor_form_loo
    return form(rewards, offsets, group, energy, correction, discount, tail, energy_floor)


def _is_large(rewards: Tensor) -> bool:
    return rewards.device.type == "cpu" and rewards.numel() >= _COMPILED_FROM_ACTIONS


def _compiled() -> ModuleType:
    from otb_megatron.algorithms import optimal_token_baseline_numba

    return optimal_token_baseline_numba


def tensor_form(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float, tail: Tail, energy_floor: float
) -> Tensor:
    """[actions]: `optimal_token_baseline` in plain tensor operations, on any device. The compiled twin is tested against it."""
    steps = _Steps.of(rewards, offsets, group, energy, correction, discount)
    alive, sums = steps.sums_over_live(torch.ones_like(steps.key, dtype=torch.bool))
    baseline = _floored_mean(alive, sums, energy_floor * steps.number.double())[steps.key]
    group_mean = steps.groups.mean(steps.first_return())[steps.groups.index]
    return steps.advantages(baseline, alive, tail, group_mean).to(rewards.dtype)


def tensor_form_loo(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float, tail: Tail, energy_floor: float
) -> Tensor:
    """[actions]: `optimal_token_baseline_loo` in plain tensor operations, on any device. One pass for each place in a group."""
    steps = _Steps.of(rewards, offsets, group, energy, correction, discount)
    ordinal = steps.groups.ordinal()[steps.sample]
    baseline = torch.zeros_like(steps.returns)
    for left_out in range(int(steps.groups.size.max()) if steps.groups.size.numel() else 0):
        alive, sums = steps.sums_over_live(ordinal != left_out)
        own = ordinal == left_out
        baseline[own] = _floored_mean(alive, sums, energy_floor * steps.number.double())[steps.key[own]]
    alive, _ = steps.sums_over_live(torch.ones_like(steps.key, dtype=torch.bool))
    first, size = steps.first_return(), steps.groups.size[steps.groups.index]
    others_mean = (steps.groups.total(first)[steps.groups.index] - first) / (size - 1).clamp(min=1)
    return steps.advantages(baseline, alive, tail, others_mean).to(rewards.dtype)


def _floored_mean(alive: Tensor, sums: Tensor, floor: Tensor) -> Tensor:
    """[steps]: sum_i G (W + c) / sum_i (W + c), where c lifts the mean of W to `floor`; 0 where nothing is alive.

    Args:
        alive: [steps], how many responses are alive.
        sums: [3, steps], sums over them of G, W and G W.
        floor: [steps], the least mean energy.
    """
    returns, weight, weighted = sums
    lift = (floor - weight / alive.clamp(min=1)).clamp(min=0.0)
    denominator = weight + lift * alive
    plain_mean = returns / alive.clamp(min=1)  # also the limit where energies and floor are zero
    return torch.where(denominator > 0, (weighted + lift * returns) / denominator, plain_mean)


@dataclass(frozen=True)
class _Steps:
    """The batch seen by (group, step): `key` numbers those pairs, `[steps]` arrays have one entry for each."""

    offsets: Tensor  # int64 [samples + 1]
    groups: Groups
    sample: Tensor  # int64 [actions]
    key: Tensor  # int64 [actions]
    number: Tensor  # int64 [steps], t, from 1
    group_of_step: Tensor  # int64 [steps]
    returns: Tensor  # float64 [actions], G_t
    realized: Tensor  # float64 [actions], W_t

    @classmethod
    def of(cls, rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float) -> _Steps:
        groups, sample = Groups.of(group, offsets), sample_of_action(offsets)
        longest = torch.zeros_like(groups.size).scatter_reduce_(0, groups.index, offsets.diff(), "amax")
        first_key = longest.cumsum(0) - longest
        step = torch.arange(sample.numel(), device=sample.device) - offsets[sample]
        group_of_step = torch.repeat_interleave(torch.arange(longest.numel(), device=longest.device), longest)
        number = torch.arange(group_of_step.numel(), device=longest.device) - first_key[group_of_step] + 1
        weight = energy.double() if correction is None else energy.double() * correction.double().square()
        returns = discounted_suffix_sums(rewards.double(), offsets, discount)
        return cls(offsets, groups, sample, first_key[groups.index[sample]] + step, number, group_of_step, returns, prefix_sums(weight, offsets))

    def sums_over_live(self, included: Tensor) -> tuple[Tensor, Tensor]:
        """Number of included responses alive at each step, [steps], and [3, steps] sums over them of G, W and G W."""
        key, returns, realized = self.key[included], self.returns[included], self.realized[included]
        alive = torch.zeros_like(self.number).index_add_(0, key, torch.ones_like(key))
        values = torch.stack((returns, realized, returns * realized))
        return alive, values.new_zeros(3, self.number.numel()).index_add_(1, key, values)

    def first_return(self) -> Tensor:
        """[samples]: G_1, the return of the whole response; 0 without actions."""
        member = self.groups.member
        first = self.returns.new_zeros(member.numel())
        first[member] = self.returns[self.offsets[:-1][member]]
        return first

    def advantages(self, baseline: Tensor, alive: Tensor, tail: Tail, mean_return: Tensor) -> Tensor:
        """G - B, with `tail`'s baseline where a response is alone in a group of several, and none in a group of one.

        Args:
            baseline: [actions], right where the response has peers.
            alive: [steps], responses alive.
            mean_return: [samples], the baseline of `tail: mean`.
        """
        lone = alive[self.key] == 1
        if tail == "mean":
            alone = mean_return[self.sample]
        elif tail == "hold":
            shared = torch.minimum(self._shared_steps(alive)[self.groups.index], self.offsets.diff()).clamp(min=1)
            alone = baseline[(self.offsets[:-1] + shared - 1)[self.sample]]
        else:
            alone = torch.zeros_like(baseline)
        baseline = torch.where(lone, alone, baseline)
        return self.returns - baseline.masked_fill(~self.groups.has_peers()[self.sample], 0.0)

    def _shared_steps(self, alive: Tensor) -> Tensor:
        """[groups]: how many steps of the group have at least two responses alive."""
        return torch.zeros_like(self.groups.size).index_add_(0, self.group_of_step, (alive > 1).long())
