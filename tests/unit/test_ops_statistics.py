"""The statistics head on one rank: values, gradients, memory and errors, against hand-computed numbers and the float64 reference."""

from __future__ import annotations

import argparse
import itertools
import math

import pytest
import torch

from otb_megatron.ops.statistics import IGNORED_TARGET, policy_statistics, policy_statistics_from_logits, reference_policy_statistics
from otb_megatron.types import UserError
from tools.benchmarks.live_bytes import LiveBytes
from tools.benchmarks.statistics import benchmark_rank, ratios, table, textbook

STATISTICS = ("log_prob", "entropy", "rest")


def values_of(statistics):
    return [getattr(statistics, name).detach().double() for name in STATISTICS]


def assert_statistics_close(actual, expected, relative=2e-6, absolute=1e-7):
    for name, a, e in zip(STATISTICS, values_of(actual), values_of(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=relative, atol=absolute, msg=lambda text, name=name: f"{name}: {text}")


def relative_to_largest(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def random_logits(tokens, columns, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=generator) * spread, torch.randint(0, columns, (tokens,), generator=generator)


def random_layer(tokens, padded_vocab, hidden_size, vocab, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    weight = torch.randn(padded_vocab, hidden_size, generator=generator) / math.sqrt(hidden_size) * 3
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def test_hand_computed_token():
    """pi = (1/2, 1/4, 1/4), y = 0: log_prob = -ln 2, entropy = 1/2 ln 2 + 1/2 ln 4 = 1.5 ln 2, rest = 1/16 + 1/16, sum pi^2 = 3/8."""
    logits, targets = torch.tensor([[2.0, 1.0, 1.0]]) * math.log(2), torch.tensor([0])
    as_hidden = policy_statistics(logits, torch.eye(3), targets, vocab_size=3)
    for statistics in (policy_statistics_from_logits(logits, targets, vocab_size=3), reference_policy_statistics(logits, targets), as_hidden):
        torch.testing.assert_close(statistics.log_prob, torch.tensor([-math.log(2)]))
        torch.testing.assert_close(statistics.entropy, torch.tensor([1.5 * math.log(2)]))
        torch.testing.assert_close(statistics.rest, torch.tensor([0.125]))
        torch.testing.assert_close(statistics.sum_pi_squared, torch.tensor([0.375]))


def test_hand_computed_temperature():
    """Temperature 1/2 squares the odds 2:1:1 to 4:1:1, so pi = (2/3, 1/6, 1/6); y = 1: rest = 4/9 + 1/36 = 17/36."""
    logits = torch.tensor([[2.0, 1.0, 1.0]]) * math.log(2)
    statistics = policy_statistics_from_logits(logits, torch.tensor([1]), vocab_size=3, temperature=0.5)
    torch.testing.assert_close(statistics.log_prob, torch.tensor([-math.log(6)]))
    torch.testing.assert_close(statistics.rest, torch.tensor([17 / 36]))


@pytest.mark.parametrize("vocab, columns", [(97, 97), (97, 128), (128, 128), (1000, 1000), (32768, 32896), (1, 5), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_equal_float64(vocab, columns, dtype):
    logits, _ = random_logits(13, columns)
    logits = logits.to(dtype)
    logits[:, vocab:] = 1e4  # padding that would dominate if it counted
    targets = torch.randint(0, vocab, (13,), generator=torch.Generator().manual_seed(1))
    temperature = torch.linspace(0.5, 2.0, 13)
    for value in (1.0, 0.7, temperature):
        statistics = policy_statistics_from_logits(logits, targets, vocab_size=vocab, temperature=value)
        expected = reference_policy_statistics(logits[:, :vocab].double(), targets, torch.as_tensor(value).double())
        assert_statistics_close(statistics, expected)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e4])
def test_flat_and_huge_logits_equal_float64(spread):
    logits = (torch.rand(50, 300, generator=torch.Generator().manual_seed(0)) * 2 - 1) * spread
    targets = torch.arange(50)
    assert_statistics_close(policy_statistics_from_logits(logits, targets, vocab_size=300), reference_policy_statistics(logits.double(), targets))
    if spread == 0.0:  # uniform: entropy log V, rest (V - 1) / V^2
        statistics = policy_statistics_from_logits(logits, targets, vocab_size=300)
        torch.testing.assert_close(statistics.entropy, torch.full((50,), math.log(300)))
        torch.testing.assert_close(statistics.rest, torch.full((50,), 299 / 300**2))


def test_energy_of_near_deterministic_tokens():
    """Energies expm1(log_prob)^2 + rest within 1e-4 of float64 for pi from 1/2 to 1 - 1e-7, and within their bounds:
    (1 - pi)^2 (1 + 1 / (V - 1)) <= w <= 2 (1 - pi)^2.
    """
    vocab, epsilon = 1000, torch.logspace(math.log10(0.5), -7, 60, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    others = torch.randn(60, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (60,), generator=generator)
    odds = others.scatter(1, targets.unsqueeze(1), -math.inf).logsumexp(1)
    logits = others.scatter(1, targets.unsqueeze(1), (odds + torch.log((1 - epsilon) / epsilon)).unsqueeze(1)).float()

    def energy(statistics):
        return torch.expm1(statistics.log_prob).square() + statistics.rest

    exact = reference_policy_statistics(logits.double(), targets)
    w, expected = energy(policy_statistics_from_logits(logits, targets, vocab_size=vocab)).double(), energy(exact)
    assert ((w - expected).abs() / expected).max() < 1e-4
    not_chosen = -torch.expm1(exact.log_prob)
    assert (w >= not_chosen.square() * (1 + 1 / (vocab - 1)) * (1 - 1e-4)).all()
    assert (w <= 2 * not_chosen.square() * (1 + 1e-4)).all()
    assert not_chosen.min() < 1.1e-7


def test_bounds_hold_for_random_tokens():
    logits, targets = random_logits(500, 97, spread=6.0)
    statistics = policy_statistics_from_logits(logits, targets, vocab_size=97)
    assert (statistics.log_prob <= 0).all()
    assert (statistics.entropy >= 0).all() and (statistics.entropy <= math.log(97) * (1 + 1e-6)).all()
    assert (statistics.sum_pi_squared >= 1 / 97 * (1 - 1e-6)).all() and (statistics.sum_pi_squared <= 1 + 1e-6).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_float64_autograd(temperature):
    vocab, padded = 97, 128
    hidden, weight, targets = random_layer(23, padded, 16, vocab)
    weight[vocab:] = math.nan
    upstream = torch.randn(3, 23, generator=torch.Generator().manual_seed(5))

    exact_hidden, exact_weight = hidden.double().requires_grad_(), weight[:vocab].double().requires_grad_()
    exact_logits = exact_hidden @ exact_weight.t()
    exact_logits.retain_grad()
    exact = reference_policy_statistics(exact_logits, targets, temperature)
    sum((g * getattr(exact, name)).sum() for g, name in zip(upstream.double(), STATISTICS, strict=True)).backward()

    hidden.requires_grad_(), weight.requires_grad_()
    fused = policy_statistics(hidden, weight, targets, vocab_size=vocab, temperature=temperature, entropy_grad=True, rest_grad=True, chunk_tokens=7)
    assert_statistics_close(fused, exact, relative=2e-5)  # the float32 product differs from the float64 one
    sum((g * getattr(fused, name)).sum() for g, name in zip(upstream, STATISTICS, strict=True)).backward()
    assert relative_to_largest(hidden.grad, exact_hidden.grad) < 1e-5
    assert relative_to_largest(weight.grad[:vocab], exact_weight.grad) < 1e-5
    assert (weight.grad[vocab:] == 0).all()

    logits = torch.cat([exact_logits.detach().float(), torch.full((23, padded - vocab), math.inf)], dim=1).requires_grad_()
    unfused = policy_statistics_from_logits(logits, targets, vocab_size=vocab, temperature=temperature, entropy_grad=True, rest_grad=True)
    sum((g * getattr(unfused, name)).sum() for g, name in zip(upstream, STATISTICS, strict=True)).backward()
    assert relative_to_largest(logits.grad[:, :vocab], exact_logits.grad) < 1e-5
    assert (logits.grad[:, vocab:] == 0).all()


def test_each_statistic_alone_and_only_if_asked():
    logits, targets = random_logits(9, 50)
    for index, name in enumerate(STATISTICS):
        exact_logits = logits.double().requires_grad_()
        getattr(reference_policy_statistics(exact_logits, targets), name).sum().backward()
        own = logits.clone().requires_grad_()
        statistics = policy_statistics_from_logits(own, targets, vocab_size=50, entropy_grad=index == 1, rest_grad=index == 2)
        assert [getattr(statistics, n).requires_grad for n in STATISTICS] == [True, index == 1, index == 2]
        getattr(statistics, name).sum().backward()
        assert relative_to_largest(own.grad, exact_logits.grad) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(dtype):
    hidden, weight, targets = random_layer(70, 1024, 8, 1000)
    results = []
    for chunk_tokens in (None, 1, 7, 64, 70):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        statistics = policy_statistics(h, w, targets, vocab_size=1000, entropy_grad=True, chunk_tokens=chunk_tokens)
        (statistics.log_prob - 0.1 * statistics.entropy).sum().backward()
        results.append((statistics, h.grad, w.grad))
    for statistics, hidden_grad, weight_grad in results[1:]:
        assert_statistics_close(statistics, results[0][0], relative=1e-5)
        tolerance = 1e-5 if dtype == torch.float32 else 4e-3  # bfloat16 gradients are rounded once, at the end
        assert relative_to_largest(hidden_grad, results[0][1]) < tolerance
        assert relative_to_largest(weight_grad, results[0][2]) < tolerance


def test_half_precision_operands_are_multiplied_in_float32():
    """Logits are never rounded to bfloat16: statistics equal those of the float64 product of the same bfloat16 operands."""
    hidden, weight, targets = random_layer(40, 512, 64, 500)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    expected = reference_policy_statistics(hidden.double() @ weight[:500].double().t(), targets)
    assert_statistics_close(policy_statistics(hidden, weight, targets, vocab_size=500), expected, relative=1e-5)


def test_tiles_of_columns_change_nothing(monkeypatch):
    hidden, weight, targets = random_layer(11, 1000, 8, 990)
    whole = policy_statistics(hidden, weight, targets, vocab_size=990)
    monkeypatch.setattr("otb_megatron.ops.statistics.TILE_COLUMNS", 37)
    assert_statistics_close(policy_statistics(hidden, weight, targets, vocab_size=990), whole, relative=1e-5)


def test_no_tokens_and_one_token():
    hidden, weight, targets = random_layer(1, 128, 8, 100)
    for tokens in (0, 1):
        h, w = hidden[:tokens].clone().requires_grad_(), weight.clone().requires_grad_()
        statistics = policy_statistics(h, w, targets[:tokens], vocab_size=100, entropy_grad=True)
        assert statistics.log_prob.shape == statistics.entropy.shape == statistics.rest.shape == (tokens,)
        (statistics.log_prob.sum() + statistics.entropy.sum()).backward()
        assert h.grad.shape == (tokens, 8) and w.grad.shape == (128, 8)
        assert (w.grad == 0).all() == (tokens == 0)
        logits = (h @ w.t()).detach().requires_grad_()
        policy_statistics_from_logits(logits, targets[:tokens], vocab_size=100).log_prob.sum().backward()
        assert logits.grad.shape == (tokens, 128)


def test_ignored_tokens_have_no_statistics_and_no_gradient():
    logits, targets = random_logits(6, 40)
    logits[2] = math.nan  # filler rows may hold anything
    targets[2] = targets[4] = IGNORED_TARGET
    logits.requires_grad_()
    statistics = policy_statistics_from_logits(logits, targets, vocab_size=40, entropy_grad=True, rest_grad=True)
    kept = torch.tensor([0, 1, 3, 5])
    expected = reference_policy_statistics(logits.detach()[kept].double(), targets[kept])
    for name in STATISTICS:
        values = getattr(statistics, name)
        assert (values[[2, 4]] == 0).all()
        torch.testing.assert_close(values[kept].double(), getattr(expected, name), rtol=2e-6, atol=1e-7)
    (statistics.log_prob + statistics.entropy + statistics.rest).sum().backward()
    assert (logits.grad[[2, 4]] == 0).all() and (logits.grad[kept] != 0).all()


def test_input_is_not_changed_in_any_order_of_asking():
    logits, targets = random_logits(5, 60)
    before = logits.clone()
    logits.requires_grad_()
    first = values_of(policy_statistics_from_logits(logits, targets, vocab_size=60))
    for order in itertools.permutations(STATISTICS):
        statistics = policy_statistics_from_logits(logits, targets, vocab_size=60, entropy_grad=True, rest_grad=True)
        for name in order:
            getattr(statistics, name).sum().backward(retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, values_of(statistics), strict=True))
    assert torch.equal(logits.detach(), before)


def test_non_contiguous_input():
    logits, targets = random_logits(8, 64)
    strided = torch.empty(64, 16).t()[::2]
    strided.copy_(logits)
    assert strided.stride() == (2, 16)
    results = []
    for x in (logits, strided):
        x.requires_grad_()
        statistics = policy_statistics_from_logits(x, targets, vocab_size=64)
        statistics.log_prob.sum().backward()
        results.append((statistics, x.grad))
    assert_statistics_close(results[1][0], results[0][0], relative=0, absolute=0)
    assert torch.equal(results[0][1], results[1][1])


def test_weight_gradient_goes_to_main_grad():
    """Megatron's convention: float32 main_grad is added to, the weight is marked, and autograd sees a placeholder of the right shape."""
    hidden, weight, targets = random_layer(12, 128, 8, 100)
    plain = weight.clone().requires_grad_()
    policy_statistics(hidden, plain, targets, vocab_size=100).log_prob.sum().backward()

    fused = torch.nn.Parameter(weight.clone())
    fused.main_grad = torch.ones(128, 8)
    fused.grad_added_to_main_grad = False
    fused.zero_out_wgrad = True
    policy_statistics(hidden, fused, targets, vocab_size=100, accumulate_into_main_grad=True).log_prob.sum().backward()
    torch.testing.assert_close(fused.main_grad, plain.grad + 1, rtol=1e-6, atol=1e-6)
    assert fused.grad_added_to_main_grad and (fused.grad == 0).all() and fused.grad.shape == (128, 8)


@pytest.mark.parametrize("vocab, dtype", [(32768, torch.float32), (32768, torch.bfloat16), (8192, torch.float32), (1000, torch.float32)])
def test_peak_memory_of_the_fused_path(vocab, dtype):
    """Forward and backward allocate at most 1/8 of float32 [4096, vocab] besides the two gradients, whatever the number of tokens."""
    peaks = {}
    for tokens in (1024, 4096):
        hidden, weight, targets = random_layer(tokens, vocab, 4, vocab)
        hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        with LiveBytes() as live:
            statistics = policy_statistics(hidden, weight, targets, vocab_size=vocab, entropy_grad=True, rest_grad=True)
            (statistics.log_prob + statistics.entropy + statistics.rest).sum().backward()
        gradients = 4 * hidden.numel() + 4 * weight.numel()  # float32 sums, also of bfloat16 gradients
        peaks[tokens] = live.peak_bytes - gradients
        assert live.collectives == []
    assert 256 * min(vocab, 4096) * 4 <= peaks[4096] < 4096 * vocab * 4 / 8  # at least one tile is seen
    assert peaks[4096] - peaks[1024] < 3072 * 300  # a few float64 per token


@pytest.mark.parametrize(
    "change, message",
    [
        ({"targets": [3, 100, 5]}, "target 100 of token 1 on rank 0 is outside the vocabulary of 100"),
        ({"targets": [3, 4, -1]}, "target -1 of token 2 on rank 0"),
        ({"vocab_size": 129}, "a vocabulary of 129 does not fit an output projection of 128 columns in 1 shards"),
        ({"temperature": 0.0}, "temperature 0 of token 0"),
        ({"temperature": torch.tensor([1.0, -0.5, 1.0])}, "temperature -0.5 of token 1"),
        ({"temperature": math.nan}, "temperature nan of token 0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, _ = random_layer(3, 128, 8, 100)
    arguments = {"vocab_size": 100} | change
    targets = torch.tensor(arguments.pop("targets", [3, 4, 5]))
    with pytest.raises(UserError) as fused:
        policy_statistics(hidden, weight, targets, **arguments)
    with pytest.raises(UserError) as unfused:
        policy_statistics_from_logits(hidden @ weight.t(), targets, **arguments)
    assert message in str(fused.value) and message in str(unfused.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 7, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_finite_are_found(value, column, dtype):
    """Wherever the value stands: before, at (column 7) or after the target."""
    logits, targets = random_logits(4, 100)
    targets[2] = 7
    logits[2, column] = value
    with pytest.raises(UserError, match="logits of token 2 on rank 0 .* NaN or infinite"):
        policy_statistics_from_logits(logits.to(dtype), targets, vocab_size=100)


def test_the_benchmark_compares_equal_results():
    """The textbook pipeline that the benchmark times gives the statistics that the head gives, and its report has every case."""
    logits, targets = random_logits(20, 64)
    log_prob, entropy, sum_of_squares = textbook(logits, targets, None)
    statistics = policy_statistics_from_logits(logits, targets, vocab_size=64)
    torch.testing.assert_close(statistics.log_prob, log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.sum_pi_squared, sum_of_squares, rtol=1e-5, atol=1e-6)
    shape = argparse.Namespace(tokens=8, vocab=64, hidden=4, repeats=1)
    result = benchmark_rank(shape, 1, None, torch.device("cpu"))
    report = table({"results": {"cpu TP1": result}, "ratios": {"cpu TP1": ratios(result)}})
    assert report.count("cpu TP1") == len(result) + 4
