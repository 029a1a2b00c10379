"""Packing: every promise of `schedule`'s docstring as a property, and the flat arrays of `build_microbatch` by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from otb_megatron.data.packing import ATTENTION_PARITY_TOKENS, build_microbatch, padded_length, schedule
from otb_megatron.types import Prompt, Response, Sample, Trajectories


def cost(lengths: list[int], samples: list[int]) -> int:
    return sum(lengths[s] * ATTENTION_PARITY_TOKENS + lengths[s] ** 2 for s in samples)


def log_normal_lengths(num: int, multiple: int) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(mean=6.5, sigma=0.8, size=num)  # median 665 tokens, a few above 8,000
    return [padded_length(int(length) + 1, multiple) for length in lengths]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), max_size=60) | st.lists(st.integers(1, 12), min_size=3, max_size=30),
    num_replicas=st.sampled_from([1, 1, 1, 2, 3, 5]),  # mostly one: what rounding adds hides a tight fit
    max_tokens=st.integers(1, 100) | st.integers(10, 30),
    divisor=st.sampled_from([1, 1, 1, 2, 3, 4]),
)
def test_schedule_keeps_its_promises(lengths: list[int], num_replicas: int, max_tokens: int, divisor: int) -> None:
    replicas = schedule(lengths, num_replicas=num_replicas, max_tokens=max_tokens, divisor=divisor)
    microbatches = [samples for replica in replicas for samples in replica]

    assert sorted(s for samples in microbatches for s in samples) == list(range(len(lengths)))
    assert all(sum(lengths[s] for s in samples) <= max_tokens or len(samples) == 1 for samples in microbatches)
    assert len(replicas) == num_replicas
    counts = {len(replica) for replica in replicas}
    assert len(counts) == 1 and counts.pop() % divisor == 0 and microbatches
    for replica in replicas:
        costs = [cost(lengths, samples) for samples in replica]
        assert costs == sorted(costs, reverse=True)
    assert replicas == schedule(tuple(lengths), num_replicas=num_replicas, max_tokens=max_tokens, divisor=divisor)

    # Any two bins of a best-fit packing hold more than one budget together, so there are fewer than 2 x tokens / budget + 1, before rounding.
    fitting = [length for length in lengths if length <= max_tokens]
    most = 2 * sum(fitting) // max_tokens + 1 + len(lengths) - len(fitting)
    assert len(microbatches) <= padded_length(most, num_replicas * divisor)


@pytest.mark.parametrize(
    ("num_samples", "num_replicas", "divisor", "least_fill", "most_imbalance"),
    [(4096, 8, 1, 0.95, 1.001), (512, 1, 1, 0.95, 1.0), (2048, 4, 2, 0.95, 1.001), (1024, 1, 4, 0.95, 1.0)],
)
def test_log_normal_lengths_fill_the_budget_and_balance(num_samples: int, num_replicas: int, divisor: int, least_fill: float, most_imbalance: float) -> None:
    lengths = log_normal_lengths(num_samples, multiple=4)
    replicas = schedule(lengths, num_replicas=num_replicas, max_tokens=16384, divisor=divisor)
    assert sum(lengths) / (num_replicas * len(replicas[0]) * 16384) >= least_fill
    work = [sum(cost(lengths, samples) for samples in replica) for replica in replicas]
    assert max(work) / (sum(work) / num_replicas) <= most_imbalance


def test_real_tokens_fill_the_microbatches() -> None:
    """At TP 2, CP 2 (each sample padded to 4, the total to 8) at least 95 % of the rows that are computed hold a token of a sample."""
    lengths = [int(x) + 2 for x in np.random.default_rng(1).lognormal(mean=5.0, sigma=0.8, size=256)]
    batch = trajectories([(1, length - 1) for length in lengths])
    replicas = schedule([padded_length(length, 4) for length in lengths], num_replicas=2, max_tokens=4096)
    rows = sum(
        build_microbatch(batch, samples, sequence_multiple=4, total_multiple=8, pad_token_id=0).tokens.numel() for replica in replicas for samples in replica
    )
    assert sum(lengths) / rows >= 0.95


def test_a_sample_above_the_budget_is_alone() -> None:
    assert schedule([3, 20, 3, 30], num_replicas=1, max_tokens=10) == [[[3], [1], [0, 2]]]


def test_one_replica_with_much_and_one_with_little_work_run_as_many_microbatches() -> None:
    # Budget 10: five samples of 10 need five microbatches, so each of two replicas gets three, one of them a filler.
    assert schedule([10] * 5, num_replicas=2, max_tokens=10) == [[[0], [2], [4]], [[1], [3], []]]
    # With two pipeline stages interleaved the count is even, so four each.
    assert [len(r) for r in schedule([10] * 5, num_replicas=2, max_tokens=10, divisor=2)] == [4, 4]


def test_less_than_a_budget_is_shared_by_all_replicas() -> None:
    assert schedule([5, 4, 3, 2], num_replicas=2, max_tokens=100) == [[[0, 3]], [[1, 2]]]
    assert schedule([5], num_replicas=3, max_tokens=100) == [[[0]], [[]], [[]]]
    assert schedule([], num_replicas=2, max_tokens=100, divisor=2) == [[[], []], [[], []]]


def test_a_tight_fit_falls_back_to_the_packing_that_fits() -> None:
    """Budget 10. To the lightest bin: 6 | 5, 4 to the 5, 3 to the 6, then both hold 9 and 2 has no room. To the fullest: 6 + 4 | 5 + 3 + 2."""
    assert schedule([6, 5, 4, 3, 2], num_replicas=1, max_tokens=10) == [[[0, 2], [1, 3, 4]]]


def trajectories(lengths: list[tuple[int, int]]) -> Trajectories:
    """Samples of (prompt tokens, response tokens); token ids count up from 100 over the whole batch."""
    next_id, samples = 100, []
    for number, (prompt, response) in enumerate(lengths):
        ids = tuple(range(next_id, next_id + prompt + response))
        next_id += prompt + response
        samples.append(Sample(Prompt(number, "s", (), ids[:prompt], None), Response(ids[prompt:], (-1.0,) * response, "", "stop", 0), group=number, reward=1.0))
    return Trajectories.from_samples(samples)


def test_microbatch_by_hand() -> None:
    batch = trajectories([(2, 3), (1, 1), (3, 1)])  # tokens 100..104, 105..106, 107..110
    micro = build_microbatch(batch, [2, 0], sequence_multiple=4, total_multiple=8, pad_token_id=9)
    # Sample 2 has 4 tokens and needs no padding; sample 0 has 5 and is padded to 8; 12 tokens are 4 short of a multiple of 8.
    assert micro.tokens.tolist() == [107, 108, 109, 110, 100, 101, 102, 103, 104, 9, 9, 9, 9, 9, 9, 9]
    assert micro.cu_seqlens.tolist() == [0, 4, 12, 16] and micro.cu_seqlens.dtype == torch.int32
    assert micro.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert micro.max_seqlen == 8
    assert micro.is_padding.tolist() == [False] * 9 + [True] * 7
    assert micro.routed_experts is None
    # Actions are numbered over the batch: 0-2 of sample 0 (102, 103, 104), 3 of sample 1, 4 of sample 2 (110); each is predicted one row earlier.
    assert micro.action_index.tolist() == [4, 0, 1, 2]
    assert micro.action_rows.tolist() == [2, 5, 6, 7]
    assert micro.targets.tolist() == [110, 102, 103, 104]
    assert micro.action_offsets.tolist() == [0, 1, 4] and micro.action_offsets.dtype == torch.int64


def test_routed_experts_go_with_their_tokens() -> None:
    """Two layers, three experts a token; rows of the batch are numbered, padding has -1."""
    batch = trajectories([(2, 3), (1, 1), (3, 1)])
    experts = torch.arange(11 * 6, dtype=torch.int16).view(11, 2, 3)
    batch = dataclasses.replace(batch, routed_experts=experts)
    micro = build_microbatch(batch, [2, 0], sequence_multiple=4, total_multiple=8, pad_token_id=9)
    assert micro.routed_experts is not None and micro.routed_experts.dtype == torch.int16
    assert torch.equal(micro.routed_experts[~micro.is_padding], experts[[7, 8, 9, 10, 0, 1, 2, 3, 4]])
    assert (micro.routed_experts[micro.is_padding] == -1).all()
    assert (build_microbatch(batch, [], sequence_multiple=4, total_multiple=8, pad_token_id=9).routed_experts == torch.full((8, 2, 3), -1)).all()


def test_filler_microbatch() -> None:
    micro = build_microbatch(trajectories([(2, 3)]), [], sequence_multiple=4, total_multiple=8, pad_token_id=9)
    assert micro.tokens.tolist() == [9] * 8 and micro.cu_seqlens.tolist() == [0, 8] and micro.max_seqlen == 8
    assert [t.numel() for t in (micro.action_rows, micro.targets, micro.action_index)] == [0, 0, 0]
    assert {t.dtype for t in (micro.action_rows, micro.targets, micro.action_index)} == {torch.int64}
    assert micro.action_offsets.tolist() == [0]


def test_tool_output_between_actions_is_context_and_not_action() -> None:
    """Two turns: tokens 0-1 prompt, 2 action, 3-4 tool output, 5-6 actions."""
    batch = Trajectories(
        tokens=torch.arange(50, 57),
        token_offsets=torch.tensor([0, 7]),
        action_positions=torch.tensor([2, 5, 6]),
        action_offsets=torch.tensor([0, 3]),
        rollout_log_prob=torch.zeros(3),
        rewards=torch.tensor([0.0, 0.0, 1.0]),
        group=torch.tensor([0]),
        policy_version=torch.tensor([0]),
    )
    micro = build_microbatch(batch, [0], sequence_multiple=1, total_multiple=1, pad_token_id=0)
    assert micro.action_rows.tolist() == [1, 4, 5] and micro.targets.tolist() == [52, 55, 56]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8),
    cp=st.integers(1, 3),
    tp=st.integers(1, 4),
    data=st.data(),
)
def test_every_action_is_predicted_from_the_token_before_it(lengths: list[tuple[int, int]], cp: int, tp: int, data: st.DataObject) -> None:
    batch = trajectories(lengths)
    samples = data.draw(st.permutations(range(len(lengths))))[: data.draw(st.integers(0, len(lengths)))]
    multiple = 2 * cp if cp > 1 else 1
    least = data.draw(st.integers(0, 200))
    micro = build_microbatch(batch, samples, sequence_multiple=multiple, total_multiple=tp * multiple, pad_token_id=1, min_tokens=least)

    sizes = micro.cu_seqlens.diff()
    needed = sum(padded_length(sum(lengths[sample]), multiple) for sample in samples)
    assert micro.tokens.numel() == padded_length(max(needed, least, 1), tp * multiple)
    assert micro.tokens.numel() % (tp * multiple) == 0 and micro.tokens.numel() == micro.cu_seqlens[-1] == sizes.sum()
    assert (sizes > 0).all() and (sizes % multiple == 0).all() and micro.max_seqlen == sizes.max()
    assert micro.action_index.tolist() == [a for s in samples for a in range(batch.action_offsets[s], batch.action_offsets[s + 1])]
    assert micro.action_offsets.diff().tolist() == [lengths[sample][1] for sample in samples]
    positions = batch.action_positions[micro.action_index]
    assert (micro.tokens[micro.action_rows] == batch.tokens[positions - 1]).all()  # the row holds the token before the action
    assert (micro.tokens[micro.action_rows + 1] == micro.targets).all() and (micro.targets == batch.tokens[positions]).all()
    sequence = torch.bucketize(micro.action_rows, micro.cu_seqlens[1:], right=True)
    assert (sequence == torch.bucketize(micro.action_rows + 1, micro.cu_seqlens[1:], right=True)).all()  # and never a neighbour's


def test_multiples_that_cannot_hold_together_are_refused() -> None:
    with pytest.raises(ValueError, match="total_multiple=6 is not a multiple of sequence_multiple=4"):
        build_microbatch(trajectories([(1, 1)]), [0], sequence_multiple=4, total_multiple=6, pad_token_id=0)
