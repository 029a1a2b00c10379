"""The compiled twins of `optimal_token_baseline`'s two forms, for large batches in CPU memory.

One pass over each group with scratch memory of its longest response, where the tensor form holds a dozen arrays of all
actions. Groups are shared out to threads: the compiled code holds no interpreter lock, and needs no threading runtime of
numba's, which would not survive the forks of the reward workers.

Importing this module loads numba. Compiled code is cached on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

_TAILS = {"zero": 0, "mean": 1, "hold": 2}
_MAX_THREADS = 16  # memory bandwidth is used up before


def advantages(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float, tail: str, energy_floor: float
) -> Tensor:
    """float64 [actions]: `optimal_token_baseline` on CPU tensors."""
    return _run(_plain, rewards, offsets, group, energy, correction, (discount, _TAILS[tail], energy_floor))


def advantages_loo(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float, tail: str, energy_floor: float
) -> Tensor:
    """float64 [actions]: `optimal_token_baseline_loo` on CPU tensors."""
    return _run(_leave_one_out, rewards, offsets, group, energy, correction, (discount, _TAILS[tail], energy_floor))


def _run(
    kernel: Callable[..., None],
    rewards: Tensor,
    offsets: Tensor,
    group: Tensor,
    energy: Tensor,
    correction: Tensor | None,
    options: tuple[float, int, float],
) -> Tensor:
    out = torch.empty(rewards.numel(), dtype=torch.float64)
    starts, ids = offsets.numpy(), group.numpy()
    samples = np.flatnonzero(np.diff(starts) > 0)  # one without actions is no member of its group
    members = samples[np.argsort(ids[samples], kind="stable")]
    first_member = np.flatnonzero(np.diff(ids[members], prepend=ids[members[:1]] - 1, append=ids[members[-1:]] + 1)) if members.size else np.zeros(1, np.int64)
    weights = energy.new_empty(0) if correction is None else correction
    arrays = [x.detach().contiguous().numpy() for x in (rewards, energy, weights, out)]

    discount, tail, floor = options

    def work(chunk: tuple[int, int]) -> None:
        kernel(*chunk, first_member, members, starts, *arrays, float(discount), tail, float(floor))

    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, _chunks(first_member, np.diff(starts)[members], 4 * threads)))  # list: raises what a thread raised
    return out


def _chunks(first_member: np.ndarray, lengths: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Ranges of groups with about equally many actions each."""
    actions_before = np.concatenate(([0], np.cumsum(lengths)))[first_member]
    targets = np.linspace(0, actions_before[-1], count + 1)
    bounds = np.unique(np.concatenate((np.searchsorted(actions_before, targets), [first_member.size - 1])))
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


@numba.njit(nogil=True, cache=True)
def _fill_returns(begin, end, rewards, discount, out):
    running = 0.0
    for a in range(end - 1, begin - 1, -1):
        running = rewards[a] + discount * running
        out[a] = running


@numba.njit(nogil=True, cache=True)
def _weight(a, energy, correction):
    if correction.size == 0:
        return np.float64(energy[a])
    rho = np.float64(correction[a])
    return energy[a] * rho * rho


@numba.njit(nogil=True, cache=True)
def _floored_mean(alive, returns, weight, weighted, floor):
    lift = max(0.0, floor - weight / alive)
    denominator = weight + lift * alive
    return (weighted + lift * returns) / denominator if denominator > 0.0 else returns / alive


@numba.njit(nogil=True, cache=True)
def _longest_two(first, last, members, offsets):
    longest, second = 0, 0
    for m in range(first, last):
        length = offsets[members[m] + 1] - offsets[members[m]]
        if length > longest:
            longest, second = length, longest
        elif length > second:
            second = length
    return longest, second


@numba.njit(nogil=True, cache=True)
def _plain(first_group, last_group, first_member, members, offsets, rewards, energy, correction, out, discount, tail, floor):
    for g in range(first_group, last_group):
        first, last = first_member[g], first_member[g + 1]
        longest, shared = _longest_two(first, last, members, offsets)  # beyond `shared` steps one response is alone
        alive, returns, weight, weighted = np.zeros(longest, np.int64), np.zeros(longest), np.zeros(longest), np.zeros(longest)
        for m in range(first, last):
            begin, end = offsets[members[m]], offsets[members[m] + 1]
            _fill_returns(begin, end, rewards, discount, out)
            realized = 0.0
            for a in range(begin, end):
                realized += _weight(a, energy, correction)
                t = a - begin
                alive[t] += 1
                returns[t] += out[a]
                weight[t] += realized
                weighted[t] += realized * out[a]
        if last - first == 1:
            continue
        baseline = np.zeros(longest)
        for t in range(shared):
            baseline[t] = _floored_mean(alive[t], returns[t], weight[t], weighted[t], floor * (t + 1))
        if tail == 1:
            baseline[shared:] = returns[0] / (last - first)
        elif tail == 2:
            baseline[shared:] = baseline[shared - 1]
        for m in range(first, last):
            begin, end = offsets[members[m]], offsets[members[m] + 1]
            for a in range(begin, end):
                out[a] -= baseline[a - begin]


@numba.njit(nogil=True, cache=True)
def _leave_one_out(first_group, last_group, first_member, members, offsets, rewards, energy, correction, out, discount, tail, floor):
    """The others' sums are those of the members before plus those of the members after: subtracting one's own from the total would cancel."""
    for g in range(first_group, last_group):
        first, last = first_member[g], first_member[g + 1]
        longest, shared = _longest_two(first, last, members, offsets)
        actions = 0
        for m in range(first, last):
            actions += offsets[members[m] + 1] - offsets[members[m]]
        own, after = np.empty(actions), np.empty((3, actions))  # W of each action; sums over the members after its own
        alive, total = np.zeros(longest, np.int64), np.zeros((3, longest))  # sums of G, W, G W over the members met so far
        first_returns = 0.0
        place = actions
        for m in range(last - 1, first - 1, -1):
            begin, end = offsets[members[m]], offsets[members[m] + 1]
            _fill_returns(begin, end, rewards, discount, out)
            first_returns += out[begin]
            place -= end - begin
            realized = 0.0
            for a in range(begin, end):
                t = a - begin
                realized += _weight(a, energy, correction)
                own[place + t] = realized
                for k in range(3):
                    after[k, place + t] = total[k, t]
                alive[t] += 1
                total[0, t] += out[a]
                total[1, t] += realized
                total[2, t] += realized * out[a]
        if last - first == 1:
            continue
        total[:] = 0.0
        for m in range(first, last):
            begin, end = offsets[members[m]], offsets[members[m] + 1]
            others_mean = (first_returns - out[begin]) / (last - first - 1)
            baseline = 0.0
            for a in range(begin, end):
                t = a - begin
                gain = out[a]
                if t < shared:
                    others = alive[t] - 1
                    baseline = _floored_mean(
                        others, total[0, t] + after[0, place], total[1, t] + after[1, place], total[2, t] + after[2, place], floor * t
                    )
                elif tail == 0:
                    baseline = 0.0
                elif tail == 1:
                    baseline = others_mean
                out[a] = gain - baseline
                total[0, t] += gain
                total[1, t] += own[place]
                total[2, t] += own[place] * gain
                place += 1
