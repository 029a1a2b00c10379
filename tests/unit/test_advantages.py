"""Advantage estimators: hand-worked groups, an independent float64 reading, and properties every one of them must have."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from otb_megatron.algorithms import ADVANTAGES, AdvantageInputs, check_fields, check_options, estimate, needs_critic
from otb_megatron.algorithms import optimal_token_baseline as otb
from otb_megatron.algorithms import optimal_token_baseline_numba as compiled
from otb_megatron.algorithms.token_returns import explained_variance, value_targets
from otb_megatron.types import UserError

TAILS = ("zero", "mean", "hold")


def batch(lengths, groups, rewards, **fields) -> AdvantageInputs:
    """`rewards` holds one number per sample, paid at its last action, or one per action; float64."""
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    if rewards.numel() == len(lengths) != int(offsets[-1]):
        outcome, rewards = rewards, torch.zeros(int(offsets[-1]), dtype=torch.float64)
        rewards[offsets[1:] - 1] = outcome
    fields = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in fields.items()}
    return AdvantageInputs(rewards, offsets, torch.as_tensor(groups, dtype=torch.int64), **fields)


def random_batch(seed: int, *, outcome: bool = False) -> AdvantageInputs:
    """Interleaved groups of uneven size with uneven lengths, some samples empty, token-level rewards, energies over 16 decades.

    With `outcome` only last actions are rewarded, and groups are larger: of up to 13.
    """
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 14))
    lengths = rng.integers(0 if seed % 3 else 1, 9, size=num_samples)
    actions = int(lengths.sum())
    if outcome:
        inputs = random_batch(seed)
        last = torch.zeros(actions, dtype=torch.bool).index_fill_(0, inputs.offsets[1:][inputs.offsets.diff() > 0] - 1, True)
        return dataclasses.replace(inputs, rewards=inputs.rewards * last, group=inputs.group % (10**12 * (1 + seed % 2)))
    return batch(
        lengths,
        rng.integers(-3, 3, size=num_samples) * 10**12,
        rng.normal(size=actions),
        energy=rng.uniform(0, 1.5, size=actions) ** (1 if seed % 2 else 20),
        correction=rng.uniform(0.1, 2.0, size=actions),
        values=rng.normal(size=actions),
        greedy_reward=rng.normal(size=num_samples),
    )


def otb_by_the_formula(inputs: AdvantageInputs, *, discount=1.0, tail="zero", energy_floor=1e-10, leave_one_out=False) -> np.ndarray:
    """DESIGN's formula, response by response and step by step, with no regard for cost."""
    rewards, energy, offsets, group = (getattr(inputs, f).numpy() for f in ("rewards", "energy", "offsets", "group"))
    rho = np.ones_like(energy) if inputs.correction is None else inputs.correction.numpy()
    members = {}
    for i in range(len(group)):
        if offsets[i + 1] > offsets[i]:
            r, w = rewards[offsets[i] : offsets[i + 1]], (rho**2 * energy)[offsets[i] : offsets[i + 1]]
            returns = [sum(discount ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]
            members.setdefault(group[i], {})[i] = (returns, [sum(w[: t + 1]) for t in range(len(w))])
    out = np.zeros_like(rewards)
    for group_members in members.values():
        for i, (returns, _) in group_members.items():
            held = None
            for t in range(len(returns)):
                alive = [m for m in group_members.values() if len(m[0]) > t]
                mean_pool = [m[0][0] for k, m in group_members.items() if k != i or not leave_one_out]
                if len(group_members) == 1:
                    baseline = 0.0
                elif len(alive) == 1:
                    baseline = {"zero": 0.0, "mean": np.mean(mean_pool), "hold": held}[tail]
                else:
                    pool = [m for k, m in group_members.items() if len(m[0]) > t and (k != i or not leave_one_out)]
                    weights = np.array([m[1][t] for m in pool])
                    weights = weights + max(0.0, energy_floor * (t + 1) - weights.mean())
                    baseline = held = float(np.dot(weights, [m[0][t] for m in pool]) / weights.sum())
                out[offsets[i] + t] = returns[t] - baseline
    return out


FORMS = {
    "tensor": (otb.tensor_form, otb.tensor_form_loo),
    "compiled": (compiled.advantages, compiled.advantages_loo),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("outcome", [False, True])
def test_optimal_token_baseline_is_the_formula(form, leave_one_out, outcome):
    """200 random ragged batches with token-level and with outcome rewards, every tail rule, both implementations, float64: 1e-11."""
    function = FORMS[form][leave_one_out]
    for seed in range(200):
        inputs = random_batch(seed, outcome=outcome)
        tail, discount = TAILS[seed % 3], (1.0, 0.9)[seed // 3 % 2]
        correction = inputs.correction if seed % 4 else None
        inputs = dataclasses.replace(inputs, correction=correction)
        actual = function(inputs.rewards, inputs.offsets, inputs.group, inputs.energy, correction, discount, tail, 1e-10)
        expected = otb_by_the_formula(inputs, discount=discount, tail=tail, leave_one_out=leave_one_out)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-11, err_msg=f"seed {seed}")


@pytest.mark.parametrize("name", ["optimal_token_baseline", "optimal_token_baseline_loo"])
def test_the_public_function_takes_float32_and_picks_either_form(name, monkeypatch):
    """float32 in, float32 out within 1e-6 of the float64 formula, below and above the size from which the compiled form is used."""
    inputs = random_batch(8)
    single = AdvantageInputs(**{f.name: v.float() if (v := getattr(inputs, f.name)).is_floating_point() else v for f in dataclasses.fields(inputs)})
    double = AdvantageInputs(**{f.name: v.double() if (v := getattr(single, f.name)).is_floating_point() else v for f in dataclasses.fields(inputs)})
    expected = otb_by_the_formula(double, leave_one_out=name.endswith("loo"))
    for threshold in (10**9, 0):
        monkeypatch.setattr(otb, "_COMPILED_FROM_ACTIONS", threshold)
        actual = estimate(name, single, {})
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.numpy(), expected, rtol=0, atol=1e-6)


def test_optimal_token_baseline_docstring_example():
    inputs = batch([2, 1], [5, 5], [1.0, 0.0], energy=[0.5, 1.0, 1.5])
    for tail, last in (("zero", 1.0), ("mean", 0.5), ("hold", 0.75)):
        assert estimate("tir_optimal_token_baseline", inputs, {"tail": tail}).tolist() == [0.75, last, -0.25]


def test_leave_one_out_docstring_example():
    actual = estimate("optimal_token_baseline_loo", batch([1, 1, 1], [0, 0, 0], [1.0, 0.0, 1.0], energy=[1.0, 2.0, 3.0]), {})
    np.testing.assert_allclose(actual, [0.4, -1.0, 2 / 3], atol=1e-15)


def test_correction_enters_inside_the_cumulative_sum():
    """rho = (2, 1) and (1, 1), w = 1: W = (4, 5) and (1, 2). Returns (1, 1) and (0, 0): B = 4/5, 5/7. rho outside the sum would give W_2 = 2."""
    actual = estimate("optimal_token_baseline", batch([2, 2], [0, 0], [1.0, 0.0], energy=[1.0] * 4, correction=[2.0, 1.0, 1.0, 1.0]), {})
    np.testing.assert_allclose(actual, [1 / 5, 2 / 7, -4 / 5, -5 / 7], atol=1e-15)


def test_vanishing_energies_fall_back_to_the_mean_continuously():
    """Energies (3, 1) e: B = 3/4 for large e, 1/2 for e = 0, and no jump in between.

    Below the floor f the weights are 3 e + f - 2 e and e + f - 2 e, so B = 1/2 + e / (2 f).
    """

    def baseline(scale: float) -> float:
        return 1 - float(estimate("optimal_token_baseline", batch([1, 1], [0, 0], [1.0, 0.0], energy=[3 * scale, scale]), {})[0])

    assert baseline(1.0) == baseline(1e-10) == 0.75
    assert baseline(0.0) == 0.5
    for scale in (4.999e-11, 3e-11, 1e-11, 1e-13):
        assert baseline(scale) == pytest.approx(0.5 + scale / 2e-10, abs=1e-9)


def test_near_deterministic_tokens_keep_the_baseline_within_the_returns():
    """Energies of 1e-16 to 1e-8, where the textbook form cancels: every B_t lies between the least and greatest live return."""
    for seed in range(50):
        rng = np.random.default_rng(seed)
        inputs = batch([4] * 8, [0] * 8, rng.integers(0, 2, 8).astype(float), energy=10.0 ** rng.uniform(-16, -8, 32))
        returns = inputs.rewards.view(8, 4).flip(1).cumsum(1).flip(1)
        baseline = returns - estimate("optimal_token_baseline", inputs, {}).view(8, 4)
        assert baseline.min() >= -1e-12 and baseline.max() <= 1 + 1e-12


HAND_WORKED = {
    # name: (inputs, options, expected), each derived in the docstring of its function or beside it
    "grpo": (batch([1, 1, 1, 1], [0] * 4, [1.0, 0, 0, 1]), {"epsilon": 0.0}, [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),
    "grpo without std": (batch([1, 1, 1, 1], [0] * 4, [1.0, 0, 0, 1]), {"normalize_by_std": False}, [0.5, -0.5, -0.5, 0.5]),
    "rloo": (batch([1, 1, 1, 1], [0] * 4, [1.0, 0, 0, 1]), {}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
    "opo": (batch([1, 3], [0, 0], [1.0, 0.0]), {}, [0.75, -0.25, -0.25, -0.25]),
    "optimal_global_baseline": (batch([2, 1], [0, 0], [0.0, 1.0], energy=[1.0, 0.5, 0.5]), {}, [-0.25, -0.25, 0.75]),
    "gpg": (batch([1, 1, 1, 1], [0, 0, 1, 1], [1.0, 0, 1, 1]), {}, [1.0, -1.0, 0.0, 0.0]),
    "gpg norm": (batch([1, 1], [0, 0], [1.0, 0.0]), {"norm": 0.5}, [1.0, -1.0]),
    "grpo_passk": (batch([1, 1, 1], [0] * 3, [3.0, 1.0, 2.0]), {"epsilon": 0.0}, [1.0, 0.0, 0.0]),
    "grpo_passk tie": (batch([1, 1, 1], [0] * 3, [3.0, 1.0, 3.0]), {}, [0.0, 0.0, 0.0]),
    # two groups at once, the std of (4, 1) is 4.5^(1/2)
    "grpo_passk groups": (batch([1] * 4, [0, 1, 0, 1], [4.0, 2, 1, 2]), {"epsilon": 0.0}, [3 / 4.5**0.5, 0, 0, 0]),
    "remax": (batch([2, 1], [0, 0], [1.0, 0.0], greedy_reward=[1.0, 1.0]), {}, [0.0, 0.0, -1.0]),
    "reinforce_plus_plus": (batch([1, 1], [0, 1], [1.0, 0.0]), {}, [0.5**0.5, -(0.5**0.5)]),
    # G = (0.5, 1, 0): mean 0.5, sample variance 0.25
    "reinforce_plus_plus discount": (batch([2, 1], [0, 1], [1.0, 0.0]), {"discount": 0.5}, [0.0, 1.0, -1.0]),
    "reinforce_plus_plus_baseline": (batch([1, 1], [0, 0], [1.0, 0.0]), {}, [0.5**0.5, -(0.5**0.5)]),
    # centred (1, 1, 1, -1) over four actions: mean 0.5, sample variance 1. Over the two responses it would be 0 and 2
    "reinforce_plus_plus_baseline lengths": (batch([3, 1], [0, 0], [2.0, 0.0]), {}, [0.5, 0.5, 0.5, -1.5]),
    "gae": (batch([2], [0], [0.0, 1.0], values=[0.5, 0.8]), {"lam": 0.5, "whitened": False}, [0.4, 0.2]),
    # lam = 1 - 1 / (0.5 * 4) = 0.5; delta = (0, 0, 0, 1)
    "gae_length_adaptive": (batch([4], [0], [0.0, 0, 0, 1], values=[0.0] * 4), {"alpha": 0.5, "whitened": False}, [0.125, 0.25, 0.5, 1.0]),
    # lam = 0 for a response no longer than 1 / alpha: A = delta
    "gae_length_adaptive short": (batch([2], [0], [0.0, 1], values=[0.0] * 2), {"alpha": 0.5, "whitened": False}, [0.0, 1.0]),
}


@pytest.mark.parametrize("case", HAND_WORKED)
def test_hand_worked(case):
    inputs, options, expected = HAND_WORKED[case]
    check_options("advantage", case.split()[0], [ADVANTAGES[case.split()[0]].function], options)
    np.testing.assert_allclose(estimate(case.split()[0], inputs, options).numpy(), expected, rtol=0, atol=2e-8)  # whitening adds 1e-8


def test_value_targets():
    """Rewards (0, 1), values (0.5, 0.8): the return for lam 1, V + (0.4, 0.2) for lam 0.5. A second response does not reach into the first."""
    inputs = batch([2, 1], [0, 1], [0.0, 1.0, 5.0], values=[0.5, 0.8, 9.0])
    np.testing.assert_allclose(value_targets(inputs.rewards, inputs.offsets, inputs.values), [1.0, 1.0, 5.0])
    np.testing.assert_allclose(value_targets(inputs.rewards, inputs.offsets, inputs.values, lam=0.5), [0.9, 1.0, 5.0])


def test_estimators_with_a_critic_discount_as_its_targets_do():
    """Whoever sets no discount gets the same one in the advantages and in what the critic learns."""
    defaults = {inspect.signature(ADVANTAGES[name].function).parameters["discount"].default for name in ADVANTAGES if needs_critic(name)}
    assert defaults == {inspect.signature(value_targets).parameters["discount"].default} == {1.0}


def test_decoupled_lambda_of_vapo():
    """Rewards (0, 0, 1), values (0.2, 0.4, 0.6), alpha 0.5: lam = 1 - 1 / 1.5 = 1/3 for the policy, 1 for the critic.

    delta = (0.2, 0.2, 0.4); A_2 = 0.4, A_1 = 0.2 + 0.4 / 3, A_0 = 0.2 + A_1 / 3. The critic's targets are the return, 1.
    """
    inputs = batch([3], [0], [0.0, 0.0, 1.0], values=[0.2, 0.4, 0.6])
    advantages = estimate("gae_length_adaptive", inputs, {"alpha": 0.5, "whitened": False})
    second = 0.2 + 0.4 / 3
    np.testing.assert_allclose(advantages, [0.2 + second / 3, second, 0.4], atol=1e-7)
    np.testing.assert_allclose(value_targets(inputs.rewards, inputs.offsets, inputs.values), [1.0, 1.0, 1.0])


def test_explained_variance():
    """Returns (0, 1, 2), values (0, 1, 1): errors (0, 0, 1) of variance 2/9 against 2/3. A constant explains nothing, equal returns cannot be explained."""
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(torch.tensor([0.0, 1.0, 1.0]), returns) == pytest.approx(2 / 3)
    assert explained_variance(torch.full((3,), 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(2 - returns, returns) == pytest.approx(-3.0)  # the errors are twice as far apart as the returns
    assert math.isnan(explained_variance(returns, torch.ones(3)))


@pytest.mark.parametrize("discount, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_against_its_recursion(discount, lam):
    """A_t = delta_t + discount lam A_{t+1}, from the end, response by response, then whitened over the batch."""
    for seed in range(10):
        inputs = random_batch(seed)
        expected = np.zeros(inputs.rewards.numel())
        for start, end in itertools.pairwise(inputs.offsets.tolist()):
            following, running = 0.0, 0.0
            for a in reversed(range(start, end)):
                running = float(inputs.rewards[a] + discount * following - inputs.values[a]) + discount * lam * running
                following, expected[a] = float(inputs.values[a]), running
        options = {"discount": discount, "lam": lam}
        np.testing.assert_allclose(estimate("gae", inputs, options | {"whitened": False}), expected, atol=1e-12)
        if len(expected) > 1:
            whitened = (expected - expected.mean()) / np.sqrt(expected.var(ddof=1) + 1e-8)
            np.testing.assert_allclose(estimate("gae", inputs, options), whitened, atol=1e-12)


def whitened_by_hand(values):
    mean = sum(values) / len(values)
    return [(v - mean) / math.sqrt(sum((u - mean) ** 2 for u in values) / (len(values) - 1) + 1e-8) for v in values]


def responses_by_group(inputs: AdvantageInputs) -> list[tuple[int, list[float]]]:
    """Group and rewards of each response, in plain Python."""
    return list(zip(inputs.group.tolist(), (part.tolist() for part in by_sample(inputs.rewards, inputs.offsets)), strict=True))


def centred_by_hand(inputs: AdvantageInputs) -> list[tuple[int, float, bool]]:
    """Actions, R less the mean R of the group, and whether the group's R differ, of each response.

    One alone in its group keeps R; one without actions is no member.
    """
    responses, found = responses_by_group(inputs), []
    for own, rewards in responses:
        others = [sum(r) for group, r in responses if group == own and r]
        differ = len(others) < 2 or max(others) > min(others)
        baseline = sum(others) / len(others) if len(others) > 1 else 0.0
        found.append((len(rewards), sum(rewards) - baseline, differ))
    return found


def gpg_by_hand(inputs):
    members = [member for member in centred_by_hand(inputs) if member[0]]
    alpha = len(members) / max(1, sum(differ for _, _, differ in members))
    return [alpha * centred for actions, centred, _ in members for _ in range(actions)]


def remax_by_hand(inputs):
    pairs = zip(responses_by_group(inputs), inputs.greedy_reward.tolist(), strict=True)
    return [sum(rewards) - greedy for (_, rewards), greedy in pairs for _ in rewards]


def reinforce_plus_plus_by_hand(inputs):
    return whitened_by_hand([sum(rewards[t:]) for _, rewards in responses_by_group(inputs) for t in range(len(rewards))])


def reinforce_plus_plus_baseline_by_hand(inputs):
    """Every action counts in mean and variance, so a long response counts more."""
    return whitened_by_hand([centred for actions, centred, _ in centred_by_hand(inputs) for _ in range(actions)])


def gae_length_adaptive_by_hand(inputs):
    """alpha 0.3: lam is 0 up to three actions and 1 - 1 / (0.3 l) of each response's own length above."""
    found = []
    for (_, rewards), values in zip(responses_by_group(inputs), by_sample(inputs.values, inputs.offsets), strict=True):
        values, lam, own = [*values.tolist(), 0.0], max(0.0, 1 - 1 / (0.3 * max(1, len(rewards)))), []
        for t in reversed(range(len(rewards))):
            own.append(rewards[t] + values[t + 1] - values[t] + lam * (own[-1] if own else 0.0))
        found += reversed(own)
    return found


READINGS = {
    "gpg": (gpg_by_hand, {}),
    "remax": (remax_by_hand, {}),
    "reinforce_plus_plus": (reinforce_plus_plus_by_hand, {}),
    "reinforce_plus_plus_baseline": (reinforce_plus_plus_baseline_by_hand, {}),
    "gae_length_adaptive": (gae_length_adaptive_by_hand, {"alpha": 0.3, "whitened": False}),
}


@pytest.mark.parametrize("name", READINGS)
def test_against_an_independent_reading(name):
    """30 random ragged batches, response by response in plain Python, float64: 1e-11."""
    reading, options = READINGS[name]
    for seed in range(30):
        inputs = random_batch(seed)
        if inputs.rewards.numel() > 1:
            np.testing.assert_allclose(estimate(name, inputs, options), reading(inputs), rtol=0, atol=1e-11, err_msg=f"seed {seed}")


def by_sample(values: Tensor, offsets: Tensor) -> list[Tensor]:
    return list(values.split(offsets.diff().tolist()))


OUTCOME_METHODS = {
    # per group: outcomes, lengths, energies -> advantages; independent of the library's ragged arithmetic
    "grpo": lambda r, n, w: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "rloo": lambda r, n, w: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "opo": lambda r, n, w: r - np.average(r, weights=n),
    "optimal_global_baseline": lambda r, n, w: r - np.average(r, weights=w + max(0, 1e-10 * n.mean() - w.mean())),
    "grpo_passk": lambda r, n, w: np.where(r == r.max(), r.max() - np.sort(r)[-2], 0.0) / (r.std(ddof=1) + 1e-6),
}


@pytest.mark.parametrize("name", OUTCOME_METHODS)
def test_outcome_methods_by_id(name):
    """Uneven, interleaved groups with members dropped, against numpy on each group by itself."""
    for seed in range(40):
        inputs = dataclasses.replace(random_batch(seed), correction=None)
        lengths, group = inputs.offsets.diff().numpy(), inputs.group.numpy()
        outcome, energy = (np.array([float(x.sum()) for x in by_sample(v, inputs.offsets)]) for v in (inputs.rewards, inputs.energy))
        expected = np.zeros(len(group))
        for id in set(group):
            members = np.flatnonzero((group == id) & (lengths > 0))
            parts = outcome[members], lengths[members], energy[members]
            expected[members] = OUTCOME_METHODS[name](*parts) if len(members) > 1 else outcome[members]
        for i, part in enumerate(by_sample(estimate(name, inputs, {}), inputs.offsets)):
            np.testing.assert_allclose(part.numpy(), expected[i], rtol=0, atol=1e-9, err_msg=f"seed {seed}")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_and_names_of_groups_do_not_matter(name):
    """Samples shuffled and group ids replaced: the same advantages, sample by sample."""
    for seed in range(6):
        inputs = random_batch(seed)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(inputs.group.numel()))
        moved = {f.name: getattr(inputs, f.name) for f in dataclasses.fields(inputs)}
        for field, value in moved.items():
            if field in ("group", "greedy_reward"):
                moved[field] = value[order]
            elif field != "offsets":
                parts = by_sample(value, inputs.offsets)
                moved[field] = torch.cat([parts[i] for i in order])
        moved["offsets"] = torch.cat((torch.zeros(1, dtype=torch.int64), inputs.offsets.diff()[order].cumsum(0)))
        moved["group"] = 17 - moved["group"]
        expected = by_sample(estimate(name, inputs, {}), inputs.offsets)
        actual = by_sample(estimate(name, AdvantageInputs(**moved), {}), moved["offsets"])
        for place, i in enumerate(order):
            torch.testing.assert_close(actual[place], expected[i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "optimal_global_baseline", "reinforce_plus_plus_baseline"])
def test_rewards_that_differ_by_rounding_are_constant(name):
    """Four rewards that are 0.1 but for float32 rounding: advantage exactly 0, not rounding noise over its own deviation."""
    third = torch.tensor(0.1)
    rewards = torch.stack([third, third * 3 / 3, (third + 0.7) - 0.7, third.double().float()])
    assert len(set(rewards.tolist())) > 1
    inputs = AdvantageInputs(rewards, torch.arange(5), torch.zeros(4, dtype=torch.int64), energy=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert estimate(name, inputs, {}).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gae_length_adaptive"}))
def test_a_group_of_one_keeps_its_return(name):
    """Beside a constant group, and although a second member without actions shares its id. gpg scales by 3 samples / 1 with signal."""
    inputs = batch([2, 0, 1, 1], [3, 3, 4, 4], [0.0, 2.5, 1.0, 1.0], energy=[0.3, 0.2, 0.5, 0.5])
    expected = 3 * 2.5 if name == "gpg" else 2.5
    assert estimate(name, inputs, {}).tolist() == pytest.approx([expected, expected, 0.0, 0.0])


@pytest.mark.parametrize("name", ADVANTAGES)
def test_empty_batch(name):
    inputs = batch([], [], [], energy=[], values=[], greedy_reward=[])
    assert estimate(name, inputs, {}).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_required_is_what_the_function_takes_without_a_default(name):
    entry = ADVANTAGES[name]
    parameters = inspect.signature(entry.function).parameters.values()
    always = {"rewards", "offsets", "group"}
    assert entry.required == {p.name for p in parameters if p.default is p.empty and p.kind is not p.KEYWORD_ONLY} - always
    assert {p.name for p in parameters if p.kind is not p.KEYWORD_ONLY} <= {f.name for f in dataclasses.fields(AdvantageInputs)}


def test_missing_field_names_estimator_field_and_remedy():
    with pytest.raises(UserError, match=r"algorithm.advantage='optimal_token_baseline' needs `energy`: the statistics pass"):
        estimate("optimal_token_baseline", batch([1], [0], [1.0]), {})
    with pytest.raises(UserError, match=r"'gae' needs `values`: a critic provides it, which `train` has"):
        check_fields("gae", {"energy", "correction"})
    check_fields("optimal_token_baseline", {"energy"})


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"algorithm.advantage='optimal_token_baselin': unknown; did you mean 'optimal_token_baseline'"):
        estimate("optimal_token_baselin", batch([1], [0], [1.0]), {})


@pytest.mark.parametrize(
    "field, values, message",
    [
        ("rewards", [0.0, 0.0, float("nan")], r"rewards of sample 1 \(prompt group 42\) is nan, one of 1 such values: the reward function"),
        ("correction", [1.0, -0.5, 1.0], r"correction of sample 0 \(prompt group 41\) is -0.5"),
        ("correction", [1.0, 1.0, float("inf")], r"correction of sample 1 \(prompt group 42\) is inf"),
        ("energy", [1.0, float("nan"), 1.0], r"energy of sample 0 \(prompt group 41\) is nan"),
        ("greedy_reward", [0.0, float("inf")], r"greedy_reward of sample 1 \(prompt group 42\) is inf"),
    ],
)
def test_unusable_numbers_are_refused(field, values, message):
    fields = {"energy": [1.0, 1.0, 1.0]} | ({} if field == "rewards" else {field: values})
    inputs = batch([2, 1], [41, 42], values if field == "rewards" else [0.0, 0.0, 1.0], **fields)
    with pytest.raises(UserError, match=message):
        estimate("optimal_token_baseline", inputs, {})


def test_lengths_that_contradict_each_other_are_refused():
    good = batch([2, 1], [0, 0], [1.0, 0.0], energy=[1.0, 1.0, 1.0])
    for field, value, message in (
        ("group", torch.zeros(3, dtype=torch.int64), r"`group` has shape \(3,\), but 2 samples with 3 actions ask for \(2,\)"),
        ("energy", torch.ones(2), r"`energy` has shape \(2,\)"),
        ("offsets", torch.tensor([0, 2, 4]), "offsets must rise from 0 to the 3 actions"),
        ("offsets", torch.tensor([0, 4, 3]), "offsets must rise"),
    ):
        with pytest.raises(ValueError, match=message):
            estimate("optimal_token_baseline", dataclasses.replace(good, **{field: value}), {})
