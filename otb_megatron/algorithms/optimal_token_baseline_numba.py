"""The compiled twins of `optimal_token_baseline`'s two forms, for large batches in CPU memory.

One pass over each group, with scratch memory for that group alone, where the tensor form holds a dozen arrays of all actions.
Groups are shared out to threads: the compiled code holds no interpreter lock, and needs no threading runtime of numba's,
which would not survive the forks of the reward workers.

Importing this module loads numba. Compiled code is cached on disk.
"""

from __future__ import annotations

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
    """[actions], the dtype of the rewards: `optimal_token_baseline` on CPU tensors."""
    return _run(_plain, rewards, offsets, group, energy, correction, (discount, _TAILS[tail], energy_floor))


def advantages_loo(
    rewards: Tensor, offsets: Tensor, group: Tensor, energy: Tensor, correction: Tensor | None, discount: float, tail: str, energy_floor: float
) -> Tensor:
    """[actions], the dtype of the rewards: `optimal_token_baseline_loo` on CPU tensors."""
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
    out = torch.empty_like(rewards, memory_format=torch.contiguous_format)
    starts, ids = offsets.contiguous().numpy(), group.numpy()
    samples = np.flatnonzero(np.diff(starts) > 0)  # one without actions is no member of its group
    members = samples[np.argsort(ids[samples], kind="stable")]
    first_member = np.flatnonzero(np.diff(ids[members], prepend=ids[members[:1]] - 1, append=ids[members[-1:]] + 1)) if members.size else np.zeros(1, np.int64)
    weights = energy.new_empty(0) if correction is None else correction
    arrays = [x.detach().contiguous().numpy() for x in (rewards, energy, weights, out)]

    discount, tail, floor = options

    def work(chunk: tuple[int, int]) -> None:
        kernel(*chunk, first_member, members, starts, *arrays, float(discount), tail, float(floor))

    threads = min(_MAX_THREADS, numba.config.NUMBA_NUM_THREADS)  # the processors this process may use
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, _chunks(first_member, np.diff(starts)[members], 4 * threads)))  # list: raises what a thread raised
    return out


def _chunks(first_member: np.ndarray, lengths: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Ranges of groups with about equally many actions each."""
    actions_before = np.concatenate(([0], np.cumsum(lengths)))[first_member]
    targets = np.linspace(0, actions_before[-1], count + 1)
    bounds = np.unique(np.concatenate((np.searchsorted(actions_before, targets), [first_member.size - 1])))
    return list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))


@numba.njit(nogil=True, cache=True, fastmath={"contract"})  # fused multiply-add halves the latency that bounds this loop
def _scan(begin, end, rewards, energy, correction, discount, returns, realized):
    """returns[t] = G and realized[t] = W of the sample's action t. One loop, so that the two dependency chains overlap."""
    last = end - begin - 1
    g, w = 0.0, 0.0
    for t in range(end - begin):
        g = rewards[end - 1 - t] + discount * g
        returns[last - t] = g
        rho = np.float64(correction[begin + t]) if correction.size else 1.0
        w += energy[begin + t] * rho * rho
        realized[t] = w


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
def _place(first, last, members, offsets):
    """Where each member's actions start in scratch memory of the group, and the size of that."""
    place = np.zeros(last - first + 1, np.int64)
    for m in range(first, last):
        place[m - first + 1] = place[m - first] + offsets[members[m] + 1] - offsets[members[m]]
    return place


@numba.njit(nogil=True, cache=True)
def _plain(first_group, last_group, first_member, members, offsets, rewards, energy, correction, out, discount, tail, floor):
    for g in range(first_group, last_group):
        first, last = first_member[g], first_member[g + 1]
        longest, shared = _longest_two(first, last, members, offsets)  # beyond `shared` steps one response is alone
        place = _place(first, last, members, offsets)
        returns, realized = np.empty(place[-1]), np.empty(longest)
        ended, total, weight, weighted = np.zeros(longest + 1), np.zeros(longest), np.zeros(longest), np.zeros(longest)
        for m in range(first, last):
            begin, end = offsets[members[m]], offsets[members[m] + 1]
            own = returns[place[m - first] : place[m - first + 1]]
            _scan(begin, end, rewards, energy, correction, discount, own, realized)
            ended[own.size] += 1
            for t in range(own.size):
                total[t] += own[t]
                weight[t] += realized[t]
                weighted[t] += realized[t] * own[t]
        baseline = np.zeros(longest)
        if last - first > 1:
            alive = last - first
            for t in range(shared):
                alive -= ended[t]
                baseline[t] = _floored_mean(alive, total[t], weight[t], weighted[t], floor * (t + 1))
            if tail == 1:
                baseline[shared:] = total[0] / (last - first)
            elif tail == 2:
                baseline[shared:] = baseline[shared - 1]
        for m in range(first, last):
            begin, own = offsets[members[m]], returns[place[m - first] : place[m - first + 1]]
            for t in range(own.size):
                out[begin + t] = own[t] - baseline[t]


@numba.njit(nogil=True, cache=True)
def _leave_one_out(first_group, last_group, first_member, members, offsets, rewards, energy, correction, out, discount, tail, floor):
    """The others' sums are those of the members before plus those of the members after: subtracting one's own from the total would cancel."""
    for g in range(first_group, last_group):
        first, last = first_member[g], first_member[g + 1]
        longest, shared = _longest_two(first, last, members, offsets)
        place = _place(first, last, members, offsets)
        returns, realized, after = np.empty(place[-1]), np.empty(place[-1]), np.empty((3, place[-1]))
        alive, met = np.zeros(longest, np.int64), np.zeros((3, longest))  # sums of G, W, G W over the members met so far
        first_returns = 0.0
        for m in range(last - 1, first - 1, -1):
            p, q = place[m - first], place[m - first + 1]
            _scan(offsets[members[m]], offsets[members[m] + 1], rewards, energy, correction, discount, returns[p:q], realized[p:q])
            first_returns += returns[p]
            for t in range(q - p):
                after[0, p + t], after[1, p + t], after[2, p + t] = met[0, t], met[1, t], met[2, t]
                alive[t] += 1
                _meet(met, t, returns[p + t], realized[p + t])
        met[:] = 0.0
        for m in range(first, last):
            begin, p, q = offsets[members[m]], place[m - first], place[m - first + 1]
            baseline = 0.0
            for t in range(q - p):
                if last - first > 1 and t < shared:
                    others = met[0, t] + after[0, p + t], met[1, t] + after[1, p + t], met[2, t] + after[2, p + t]
                    baseline = _floored_mean(alive[t] - 1, others[0], others[1], others[2], floor * (t + 1))
                elif last - first == 1 or tail == 0:
                    baseline = 0.0
                elif tail == 1:
                    baseline = (first_returns - returns[p]) / (last - first - 1)
                out[begin + t] = returns[p + t] - baseline  # tail 2 holds the last baseline
                _meet(met, t, returns[p + t], realized[p + t])


@numba.njit(nogil=True, cache=True)
def _meet(met, t, g, w):
    met[0, t] += g
    met[1, t] += w
    met[2, t] += w * g
