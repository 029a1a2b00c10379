"""The compiled twins of `optimal_token_baseline`'s two forms, for large batches in CPU memory.

One pass over each group, with scratch memory for that group alone, where the tensor form holds a dozen arrays of all actions.
Groups are shared out to threads: the compiled code holds no interpreter lock, and needs no threading runtime of numba's,
which would not survive the forks of the reward workers.

Importing this module loads numba. Compiled code is cached on disk where that can be written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor

from otb_megatron.jit import njit

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
    arrays = [None if x is None else x.detach().contiguous().numpy() for x in (rewards, energy, correction, out)]

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


# Arrays are indexed through slices that start at the response: an index that may be negative costs a test for each action.
@njit()
def _of_response(energy, correction, begin, count):
    if correction is None:
        return energy[begin : begin + count], None
    return energy[begin : begin + count], correction[begin : begin + count]


@njit()
def _energy(energy, correction, t):
    if correction is None:  # decided when the caller is compiled, once for each type
        return np.float64(energy[t])
    rho = np.float64(correction[t])
    return energy[t] * rho * rho


@njit(fastmath={"contract"})  # fused multiply-add halves the latency that bounds this loop
def _scan(begin, end, rewards, energy, correction, discount, returns, realized):
    """returns[t] = G and realized[t] = W of the sample's action t. One loop, so that the two dependency chains overlap."""
    own, rho = _of_response(energy, correction, begin, end - begin)
    paid = rewards[begin:end]
    last = paid.size - 1
    g, w = 0.0, 0.0
    for t in range(paid.size):
        g = paid[last - t] + discount * g
        returns[last - t] = g
        w += _energy(own, rho, t)
        realized[t] = w


@njit()
def _floored_mean(alive, returns, weight, weighted, floor):
    lift = max(0.0, floor - weight / alive)
    denominator = weight + lift * alive
    return (weighted + lift * returns) / denominator if denominator > 0.0 else returns / alive


@njit()
def _longest_two(first, last, members, offsets):
    longest, second = 0, 0
    for m in range(first, last):
        length = offsets[members[m] + 1] - offsets[members[m]]
        if length > longest:
            longest, second = length, longest
        elif length > second:
            second = length
    return longest, second


@njit()
def _place(first, last, members, offsets):
    """Where each member's actions start in scratch memory of the group, and the size of that."""
    place = np.zeros(last - first + 1, np.int64)
    for m in range(first, last):
        place[m - first + 1] = place[m - first] + offsets[members[m] + 1] - offsets[members[m]]
    return place


@njit()
def _plain(first_group, last_group, first_member, members, offsets, rewards, energy, correction, out, discount, tail, floor):
    for g in range(first_group, last_group):
        group = members[first_member[g] : first_member[g + 1]]
        if discount == 1.0 and _paid_at_the_end(group, offsets, rewards):
            _plain_outcome(group, offsets, rewards, energy, correction, out, tail, floor)
        else:
            _plain_group(group, offsets, rewards, energy, correction, out, discount, tail, floor)


@njit()
def _plain_group(group, offsets, rewards, energy, correction, out, discount, tail, floor):
    longest, shared = _longest_two(0, group.size, group, offsets)  # beyond `shared` steps one response is alone
    place = _place(0, group.size, group, offsets)
    returns, realized = np.empty(place[-1]), np.empty(longest)
    ended, total, weight, weighted = np.zeros(longest + 1), np.zeros(longest), np.zeros(longest), np.zeros(longest)
    for m in range(group.size):
        own = returns[place[m] : place[m + 1]]
        _scan(offsets[group[m]], offsets[group[m] + 1], rewards, energy, correction, discount, own, realized)
        ended[own.size] += 1
        for t in range(own.size):
            total[t] += own[t]
            weight[t] += realized[t]
            weighted[t] += realized[t] * own[t]
    baseline = np.zeros(longest)
    if group.size > 1:
        alive = group.size
        for t in range(shared):
            alive -= ended[t]
            baseline[t] = _floored_mean(alive, total[t], weight[t], weighted[t], floor * (t + 1))
        _fill_tail(baseline, shared, total[0] / group.size, tail)
    for m in range(group.size):
        own, advantages = returns[place[m] : place[m + 1]], out[offsets[group[m]] : offsets[group[m] + 1]]
        for t in range(own.size):
            advantages[t] = own[t] - baseline[t]


@njit()
def _paid_at_the_end(group, offsets, rewards):
    """Whether only last actions are rewarded. A count of the others, and not a search for the first: it is vectorised."""
    earlier = 0
    for member in group:
        before_last = rewards[offsets[member] : offsets[member + 1] - 1]
        for t in range(before_last.size):
            earlier += before_last[t] != 0.0
    return earlier == 0


@njit()
def _plain_outcome(group, offsets, rewards, energy, correction, out, tail, floor):
    """`_plain_group` where G is one number a response: nothing but the energies is summed along it, for four responses at once."""
    lengths = offsets[group + 1] - offsets[group]
    group = group[np.argsort(lengths, kind="mergesort")]  # equal lengths side by side
    lengths = offsets[group + 1] - offsets[group]
    longest, shared = lengths[-1], lengths[-2] if group.size > 1 else 0
    outcome = np.empty(group.size)
    ending, ended, weight, weighted = np.zeros(longest), np.zeros(longest), np.zeros(longest), np.zeros(longest)
    for m in range(group.size):
        outcome[m] = rewards[offsets[group[m] + 1] - 1]
        ending[lengths[m] - 1] += outcome[m]
        ended[lengths[m] - 1] += 1
    realized = np.zeros(group.size)
    for m in range(0, group.size - 3, 4):
        _meet_four(offsets[group[m : m + 4]], lengths[m], energy, correction, outcome[m : m + 4], realized[m : m + 4], weight, weighted)
    for m in range(group.size):
        met = lengths[m - m % 4] if m < group.size - group.size % 4 else 0
        _meet_one(offsets[group[m]], met, lengths[m], energy, correction, outcome[m], realized[m], weight, weighted)
    baseline = np.zeros(longest)
    if group.size > 1:
        alive, total = 0.0, 0.0
        for t in range(longest - 1, -1, -1):
            alive += ended[t]
            total += ending[t]
            if t < shared:
                baseline[t] = _floored_mean(alive, total, weight[t], weighted[t], floor * (t + 1))
        _fill_tail(baseline, shared, total / group.size, tail)
    for m in range(group.size):
        own, advantages = outcome[m], out[offsets[group[m]] : offsets[group[m] + 1]]
        for t in range(advantages.size):
            advantages[t] = own - baseline[t]


@njit()
def _fill_tail(baseline, shared, mean_return, tail):
    if tail == 1:
        baseline[shared:] = mean_return
    elif tail == 2:
        baseline[shared:] = baseline[shared - 1]


@njit(fastmath={"contract"})
def _meet_four(begins, count, energy, correction, outcome, realized, weight, weighted):
    """Adds W and G W of the first `count` actions of four responses: four sums that do not wait for each other."""
    e0, c0 = _of_response(energy, correction, begins[0], count)
    e1, c1 = _of_response(energy, correction, begins[1], count)
    e2, c2 = _of_response(energy, correction, begins[2], count)
    e3, c3 = _of_response(energy, correction, begins[3], count)
    g0, g1, g2, g3 = outcome[0], outcome[1], outcome[2], outcome[3]
    w0, w1, w2, w3 = 0.0, 0.0, 0.0, 0.0
    for t in range(count):
        w0 += _energy(e0, c0, t)
        w1 += _energy(e1, c1, t)
        w2 += _energy(e2, c2, t)
        w3 += _energy(e3, c3, t)
        weight[t] += (w0 + w1) + (w2 + w3)
        weighted[t] += (g0 * w0 + g1 * w1) + (g2 * w2 + g3 * w3)
    realized[0], realized[1], realized[2], realized[3] = w0, w1, w2, w3


@njit(fastmath={"contract"})
def _meet_one(begin, first, last, energy, correction, outcome, realized, weight, weighted):
    own, rho = _of_response(energy, correction, begin, last)
    for t in range(first, last):
        realized += _energy(own, rho, t)
        weight[t] += realized
        weighted[t] += outcome * realized


@njit()
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


@njit()
def _meet(met, t, g, w):
    met[0, t] += g
    met[1, t] += w
    met[2, t] += w * g
