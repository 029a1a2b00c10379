"""The statistics head over tensor-parallel groups of 1, 2 and 4 gloo ranks: values, gradients, communication and errors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from otb_megatron.ops.statistics import policy_statistics, policy_statistics_from_logits, reference_policy_statistics
from otb_megatron.types import UserError
from tests.distributed.launcher import run_ranks
from tools.benchmarks.live_bytes import LiveBytes

TOKENS, HIDDEN = 19, 16
CASES = [  # vocabulary, padded vocabulary; the second leaves ranks of a group of 4 with nothing but padding
    (97, 104),
    (97, 512),
    (128, 128),
    (1000, 1024),
    (32768, 33024),
]
STATISTICS = ("log_prob", "entropy", "rest")


def layer(vocab, padded):
    """The whole layer in float64, padding filled so that counting it could not go unseen, and upstream gradients."""
    generator = torch.Generator().manual_seed(vocab + padded)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).double()
    weight = torch.randn(padded, HIDDEN, generator=generator).double() * 0.8
    weight[vocab:] = float("nan")
    targets = torch.randint(0, vocab, (TOKENS,), generator=generator)
    targets[:4] = torch.tensor([0, vocab - 1, vocab // 2, vocab // 4])
    temperature = torch.rand(TOKENS, generator=generator) + 0.5
    return hidden, weight, targets, temperature, torch.randn(3, TOKENS, generator=generator)


def exact_results(vocab, padded):
    """float64 on one rank: statistics of the float32-rounded logits, and gradients of hidden, weight and logits."""
    hidden, weight, targets, temperature, upstream = layer(vocab, padded)
    hidden, own = hidden.requires_grad_(), weight[:vocab].clone().requires_grad_()
    logits = hidden @ own.t()
    logits.retain_grad()
    fused = reference_policy_statistics(logits, targets, temperature.double())
    sum((g * getattr(fused, name)).sum() for g, name in zip(upstream.double(), STATISTICS, strict=True)).backward()
    rounded = reference_policy_statistics(logits.detach().float().double(), targets, temperature.double())
    return fused, rounded, hidden.grad, own.grad, logits.grad


def run_cases(rank, world_size, tp):
    """Fused and unfused on this rank's shard, for each case: (statistics, gradients, collectives). The group is the last `tp` ranks."""
    group, tp_rank = dist.new_group(list(range(world_size - tp, world_size))), rank - (world_size - tp)
    if tp_rank < 0:
        return None
    results = []
    for vocab, padded in CASES:
        hidden, weight, targets, temperature, upstream = layer(vocab, padded)
        own = slice(tp_rank * padded // tp, (tp_rank + 1) * padded // tp)
        logits = (hidden @ weight[:vocab].t()).float()
        logits = torch.cat([logits, torch.full((TOKENS, padded - vocab), float("inf"))], dim=1)[:, own]
        options = {"vocab_size": vocab, "group": group, "temperature": temperature, "entropy_grad": True, "rest_grad": True}
        case = []
        for leaves, call in (
            ([hidden.float(), weight[own].float()], policy_statistics),
            ([logits], policy_statistics_from_logits),
        ):
            for leaf in leaves:
                leaf.requires_grad_()
            with LiveBytes() as live:
                statistics = call(*leaves, targets, **options)
                forward = list(live.collectives)
                sum((g * getattr(statistics, name)).sum() for g, name in zip(upstream, STATISTICS, strict=True)).backward()
            assert live.collectives == forward, "the backward pass communicates"
            case.append(([getattr(statistics, name).detach() for name in STATISTICS], [leaf.grad for leaf in leaves], forward))
        results.append(case)
    return results


def close(actual, expected, relative, absolute=0.0):
    torch.testing.assert_close(actual.double(), expected.detach().double(), rtol=relative, atol=absolute)


@pytest.mark.parametrize("tp, world_size", [(1, 1), (2, 3), (4, 4)])
def test_values_gradients_and_communication(tp, world_size):
    ranks = run_ranks(run_cases, world_size, tp, timeout_s=120)[-tp:]
    for index, (vocab, padded) in enumerate(CASES):
        fused, rounded, hidden_grad, weight_grad, logits_grad = exact_results(vocab, padded)
        fused_parts, unfused_parts = zip(*(cases[index] for cases in ranks), strict=True)
        for part in fused_parts:
            for value, name in zip(part[0], STATISTICS, strict=True):
                close(value, getattr(fused, name), 2e-5, 1e-7)  # the product hidden @ weight is float32 here and float64 there
        for part in unfused_parts:
            for value, name in zip(part[0], STATISTICS, strict=True):
                close(value, getattr(rounded, name), 2e-6, 1e-7)
        for parts in (fused_parts, unfused_parts):  # all ranks of a group have bitwise the same values
            assert all(torch.equal(a, b) for part in parts for a, b in zip(part[0], parts[0][0], strict=True))
        # d hidden is shared out over the ranks; weight and logits are cut
        close(sum(part[1][0] for part in fused_parts), hidden_grad, 0, 1e-5 * hidden_grad.abs().max().item())
        whole = torch.cat([part[1][1] for part in fused_parts])
        close(whole[:vocab], weight_grad, 0, 1e-5 * weight_grad.abs().max().item())
        assert (whole[vocab:] == 0).all()
        whole = torch.cat([part[1][0] for part in unfused_parts], dim=1)
        close(whole[:, :vocab], logits_grad, 0, 1e-5 * logits_grad.abs().max().item())
        assert (whole[:, vocab:] == 0).all()
        # a header of 7 and 5 sums a token from each rank, all float64; nothing has the size of a vocabulary
        expected = [] if tp == 1 else [("allgather_base", 7 * 8 * tp), ("allgather_base", 5 * 8 * TOKENS * tp)]
        assert all(part[2] == expected for part in (*fused_parts, *unfused_parts))


def run_faults(rank, world_size):
    """The message of the error on this rank for each fault, and proof that the group still works after it."""
    hidden, weight, targets, _, _ = layer(97, 104)
    hidden, weight = hidden.float(), weight.float().nan_to_num()
    shard = weight[rank * 52 : (rank + 1) * 52]
    bad_targets = targets.clone()
    bad_targets[3] = 97
    broken = shard.clone()
    broken[5] = float("nan")
    group = dist.group.WORLD
    odd = rank == 1  # the fault is on rank 1 only
    calls = {
        "target": lambda: policy_statistics(hidden, shard, bad_targets if odd else targets, vocab_size=97, group=group),
        "vocabulary": lambda: policy_statistics(hidden, shard, targets, vocab_size=105, group=group),
        "shards": lambda: policy_statistics(hidden, shard[:-4] if odd else shard, targets, vocab_size=97, group=group),
        "temperature": lambda: policy_statistics(hidden, shard, targets, vocab_size=97, group=group, temperature=-1.0 if odd else 1.0),
        "tokens": lambda: policy_statistics(hidden[: 19 - rank], shard, targets[: 19 - rank], vocab_size=97, group=group),
        "nan": lambda: policy_statistics(hidden, broken if odd else shard, targets, vocab_size=97, group=group),
        "inf": lambda: policy_statistics_from_logits(
            (hidden @ shard.t()).index_fill(0, torch.tensor([7]), float("inf") if odd else 0.0), targets, vocab_size=97, group=group
        ),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(UserError) as caught:
            call()
        messages[name] = str(caught.value)
    none = policy_statistics(hidden[:0].requires_grad_(), shard, targets[:0], vocab_size=97, group=group)
    none.log_prob.sum().backward()
    after = policy_statistics(hidden.detach(), shard, targets, vocab_size=97, group=group)
    return messages, none.log_prob.shape, after.log_prob


def test_a_fault_of_one_rank_is_an_error_on_every_rank():
    (first, second) = run_ranks(run_faults, 2, timeout_s=60)
    assert first[0] == second[0]
    expected = {
        "target": "target 97 of token 3 on rank 1 is outside the vocabulary of 97",
        "vocabulary": "a vocabulary of 105 does not fit an output projection of 104 columns in 2 shards",
        "shards": "disagree on the number of columns: [52, 48]",
        "temperature": "temperature -1 of token 0 on rank 1",
        "tokens": "disagree on the number of tokens: [19, 18]",
        "nan": "the logits of token 0 on rank 1 of the tensor-parallel group are NaN or infinite (19 such tokens",
        "inf": "the logits of token 7 on rank 1",
    }
    for name, text in expected.items():
        assert text in first[0][name], (name, first[0][name])
    assert first[1] == second[1] == (0,)
    hidden, weight, targets, _, _ = layer(97, 104)
    close(first[2], reference_policy_statistics(hidden @ weight[:97].t(), targets).log_prob, 2e-5)
