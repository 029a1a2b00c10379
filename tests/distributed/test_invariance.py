"""What a gradient, a metric or a statistic must not depend on: how samples are packed, ordered and padded, recomputed, or who is their neighbour."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.algorithms import action_weights
from otb_megatron.config import Aggregation, ParallelConfig
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from otb_megatron.types import Prompt, Response, Sample, UserError
from tests.distributed.launcher import run_ranks
from tests.distributed.layouts import DENSE, MOE, TOLERANCE, Difference, Reference
from tests.distributed.training import NUM_STEPS, largest_difference, record_samples, settings
from tests.distributed.updating import Update, apply
from tests.models import VOCAB_SIZE

TP2_SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PP2_VPP2 = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
CP2 = dict(context_parallel_size=2)
EP2 = dict(expert_model_parallel_size=2)
DP2 = dict()


@pytest.mark.parametrize(
    ("model", "max_tokens", "parallel", "world_size"),
    [
        (DENSE, 24, {}, 1),
        (DENSE, 100_000, {}, 1),
        (DENSE, 1, {}, 1),  # every sample is above the budget, so alone and padded instead of packed
        (MOE, 1, {}, 1),
        (MOE, 100_000, {}, 1),
        (DENSE, 8, DP2, 2),  # 15 samples, most of them above the budget, over an even number of microbatches
        (DENSE, 100_000, PP2_VPP2, 2),  # one microbatch would do, two stages interleaved need two
        (DENSE, 1, CP2, 2),
    ],
)  # fmt: skip
def test_the_token_budget_changes_nothing(
    references: dict[str, Reference], tmp_path: Path, model: str, max_tokens: int, parallel: dict[str, Any], world_size: int
) -> None:
    found = references[model].run(tmp_path, {"trainer": {"max_tokens_per_microbatch": max_tokens}, "parallel": parallel}, world_size)
    difference = Difference.between(found, references[model].outcome)
    assert difference.largest < TOLERANCE, difference


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_samples_changes_nothing(references: dict[str, Reference], tmp_path: Path, seed: int) -> None:
    """All 15 samples of a step shuffled, across their groups. Advantages come in the new order, everything else as before."""
    reference = references[DENSE]
    for step in range(1, NUM_STEPS + 1):
        samples = load_rollouts(reference.work_dir / "rollouts", step)
        random.Random(100 * seed + step).shuffle(samples)
        save_rollouts(tmp_path / "rollouts", step, samples)
    found = reference.run(tmp_path, {"rollout": {"replay_dir": str(tmp_path / "rollouts")}})
    difference = Difference.between(replace(found, advantages=reference.outcome.advantages), reference.outcome)
    assert difference.largest < TOLERANCE, difference
    for got, want in zip(found.advantages, reference.outcome.advantages, strict=True):
        assert not torch.equal(got, want) and torch.allclose(got.sort().values, want.sort().values, rtol=0, atol=1e-6)


def test_replicas_without_a_sample_take_part(references: dict[str, Reference], tmp_path: Path) -> None:
    """One group of three samples on four data-parallel ranks: one rank at least runs an empty microbatch."""
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE, num_groups=1)
    rollout = {"rollout": {"replay_dir": str(tmp_path / "rollouts")}}
    one = references[DENSE].run(tmp_path / "one", rollout)
    four = references[DENSE].run(tmp_path / "four", rollout, 4)
    assert Difference.between(four, one).largest < TOLERANCE, Difference.between(four, one)


def sample(prompt_tokens: int, response_tokens: int, seed: int, group: int = 0, reward: float = 1.0) -> Sample:
    draw = random.Random(seed)
    tokens = [draw.randrange(2, VOCAB_SIZE) for _ in range(prompt_tokens + response_tokens)]
    response = Response(tuple(tokens[prompt_tokens:]), (-1.0,) * response_tokens, "", "stop", 0)
    return Sample(Prompt(group, "test", (), tuple(tokens[:prompt_tokens]), "", {}), response, group, reward)


@pytest.mark.parametrize(("model", "parallel", "world_size"), [(DENSE, {}, 1), (MOE, {}, 1), (DENSE, CP2, 2), (MOE, TP2_SP, 2)])
def test_a_neighbour_in_the_pack_changes_no_bit(
    references: dict[str, Reference], tmp_path: Path, model: str, parallel: dict[str, Any], world_size: int
) -> None:
    """A sample alone, beside others of any length and content, and behind them."""
    own = sample(7, 9, seed=1)
    packs = [
        [own],
        [own, sample(8, 10, seed=2, group=1)],
        [own, sample(8, 10, seed=3, group=1)],
        [own, sample(20, 30, seed=4, group=1)],
        [sample(30, 31, seed=5, group=1), own],
        [own, *(sample(3 + i, 5 + 2 * i, seed=10 + i, group=1) for i in range(12))],
    ]
    values = _values(references[model], tmp_path, parallel=parallel, trainer={"max_tokens_per_microbatch": 4096})
    found = apply(values, world_size, [Update(pack) for pack in packs])
    alone, *beside = (_statistics_of(own, pack, statistics) for pack, statistics in zip(packs, found.statistics, strict=True))
    for statistics in beside:
        assert torch.equal(statistics, alone)


def _statistics_of(own: Sample, pack: list[Sample], statistics: Any) -> Tensor:
    first = sum(len(other.response.token_ids) for other in pack[: pack.index(own)])
    rows = slice(first, first + len(own.response.token_ids))
    return torch.stack([statistics.log_prob[rows], statistics.entropy[rows], statistics.rest[rows]])


def _values(reference: Reference, work_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration under which weights do not move, unless `sections` says otherwise."""
    values = settings(reference.work_dir / "model", reference.work_dir)
    for name, entries in ({"optimizer": {"lr": 1e-30}} | sections).items():
        values[name] = values.get(name, {}) | entries
    values["trainer"]["output_dir"] = str(work_dir / "run")
    return values


@pytest.mark.parametrize(
    ("model", "parallel", "world_size"),
    [(DENSE, {}, 1), (DENSE, TP2_SP, 2), (DENSE, PP2_VPP2, 2), (DENSE, CP2, 2), (DENSE, DP2, 2), (MOE, EP2, 2), (MOE, TP2_SP, 2)],
)  # fmt: skip
def test_the_first_kl_is_zero_and_the_on_policy_ratio_is_one(
    references: dict[str, Reference], tmp_path: Path, model: str, parallel: dict[str, Any], world_size: int
) -> None:
    """Exactly: policy and reference agree in every bit before the first update, and so do statistics pass and training pass at every step.

    Then k3 = exp(0) - 0 - 1 and the estimate of KL(old, new) are sums of zeros, and no ratio is clipped.
    """
    found = references[model].run(tmp_path, {"algorithm": {"kl_coef": 0.1}, "parallel": parallel}, world_size)
    assert found.metrics[0]["loss/kl"] == 0.0 and found.metrics[1]["loss/kl"] > 0.0
    assert [step["policy/approx_kl"] for step in found.metrics] == [0.0] * NUM_STEPS
    assert [step["policy/clip_fraction"] for step in found.metrics] == [0.0] * NUM_STEPS


SAMPLES = [sample(1 + i % 5, 1 + 3 * i % 11, seed=20 + i, group=i // 2, reward=(-1.0, 0.25, 1.5)[i % 3]) for i in range(8)]
AGGREGATIONS: tuple[Aggregation, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(("parallel", "world_size"), [({}, 1), (DP2, 2), (CP2, 2), (PP2_VPP2, 2)])
def test_the_gradient_is_that_of_autograd_through_transformers(
    references: dict[str, Reference], tmp_path: Path, parallel: dict[str, Any], world_size: int
) -> None:
    """The scale of the loss, absolutely: with ratios of one the gradient is that of -sum_i weight_i A_i log pi(y_i), in float64.

    Several microbatches a rank, under each aggregation. 2e-5: float32 against float64, not against float32 in another order.
    """
    reference = references[DENSE]
    values = _values(reference, tmp_path, parallel=parallel, trainer={"max_tokens_per_microbatch": 20})
    found = apply(values, world_size, [Update(SAMPLES, aggregation=aggregation) for aggregation in AGGREGATIONS])
    model = AutoModelForCausalLM.from_pretrained(reference.work_dir / "model", dtype=torch.float64).eval()
    lengths = torch.tensor([len(s.response.token_ids) for s in SAMPLES])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    log_probs = torch.cat([_log_probs(model, s) for s in SAMPLES])
    advantages = torch.tensor([s.reward for s in SAMPLES]).repeat_interleave(lengths)
    for aggregation, got in zip(AGGREGATIONS, found.gradients, strict=True):
        model.zero_grad()
        weight = action_weights(offsets, aggregation, 14)
        (-(weight * advantages * log_probs).sum()).backward(retain_graph=True)
        want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        assert largest_difference(got, want) < 2 * TOLERANCE, aggregation


def _log_probs(model: torch.nn.Module, of: Sample) -> Tensor:
    tokens = torch.tensor([*of.prompt.token_ids, *of.response.token_ids])
    log_pi = torch.log_softmax(model(tokens[None]).logits[0, :-1] / 0.9, -1)  # the temperature of tests.distributed.training
    return log_pi.gather(1, tokens[1:, None]).flatten()[len(of.prompt.token_ids) - 1 :]


@pytest.mark.parametrize(("parallel", "world_size"), [(DP2, 2), (CP2, 2)])
def test_fully_masked_microbatches_count_and_add_nothing(references: dict[str, Reference], tmp_path: Path, parallel: dict[str, Any], world_size: int) -> None:
    """One sample a microbatch, three of eight masked: the gradient of one pack in one process, to which the masked ones add zeros."""
    update = Update(SAMPLES, masked=frozenset({0, 3, 7}))
    one = apply(_values(references[DENSE], tmp_path, trainer={"max_tokens_per_microbatch": 4096}), 1, [update, Update(SAMPLES)])
    many = apply(_values(references[DENSE], tmp_path, parallel=parallel, trainer={"max_tokens_per_microbatch": 1}), world_size, [update])
    assert all(tensor.isfinite().all() for tensor in many.gradients[0].values())
    assert largest_difference(many.gradients[0], one.gradients[0]) < TOLERANCE
    assert many.metrics[0]["loss/policy"] == pytest.approx(one.metrics[0]["loss/policy"], rel=TOLERANCE)
    assert largest_difference(one.gradients[1], one.gradients[0]) > 0.1  # nothing masked


@pytest.mark.parametrize(
    ("parallel", "world_size", "optimizer"),
    [({}, 1, {}), (DP2, 2, {}), (DP2, 2, {"use_distributed_optimizer": False}), (TP2_SP, 2, {})],
)  # fmt: skip
def test_a_step_without_signal_moves_nothing(
    references: dict[str, Reference], tmp_path: Path, parallel: dict[str, Any], world_size: int, optimizer: dict[str, Any]
) -> None:
    """Every response masked, every advantage zero, or no response at all, between two steps with a signal.

    Adam's momentum and its weight decay would move the weights, and the schedule would advance: all weights must end in the very bits of
    a run without those steps.
    """
    schedule = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "lr_warmup_steps": 2, "lr_decay_steps": 10, "lr_decay_style": "linear"}
    values = _values(references[DENSE], tmp_path, parallel=parallel, optimizer=schedule | optimizer)
    signal = Update(SAMPLES)
    silent = [Update(SAMPLES, masked=frozenset(range(len(SAMPLES)))), Update([replace(s, reward=0.0) for s in SAMPLES]), Update([])]
    without = apply(values, world_size, [signal, signal])
    among = apply(values, world_size, [signal, *silent, signal])
    assert all(torch.equal(among.weights[name], tensor) for name, tensor in without.weights.items())
    rates = [metrics.get("optimizer/lr") for metrics in among.metrics]
    assert rates == [pytest.approx(0.005), pytest.approx(0.005), pytest.approx(0.005), None, pytest.approx(0.01)]
    assert [metrics.get("optimizer/grad_norm") for metrics in among.metrics[1:4]] == [0.0, 0.0, None]


def test_deterministic_mode_computes_the_same_bits_again(references: dict[str, Reference], tmp_path: Path) -> None:
    """And the deterministic operations compute what the others do."""
    sections = {"megatron": {"deterministic_mode": True}, "parallel": TP2_SP}
    first, second = (references[MOE].run(tmp_path / name, sections, 2) for name in ("first", "second"))
    assert Difference.between(second, first).largest == 0.0
    assert Difference.between(first, references[MOE].outcome).largest < TOLERANCE


def _environment_of_a_deterministic_run(rank: int, world_size: int, given: dict[str, str]) -> tuple[bool, list[str | None]] | str:
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(given)
    try:
        start_parallel(ParallelConfig(), seed=0, deadline_s=30, deterministic=True)
    except UserError as error:
        return str(error)
    stop_parallel()
    return torch.are_deterministic_algorithms_enabled(), [os.environ.get(name) for name in names]


def test_deterministic_mode_sets_what_the_libraries_read() -> None:
    """torch's switch, and cuBLAS, NCCL and Transformer Engine by their variables; one that is set to something else is a fault."""
    assert run_ranks(_environment_of_a_deterministic_run, 1, {}, process_group=False) == [(True, [":4096:8", "Ring", "0"])]
    (told,) = run_ranks(_environment_of_a_deterministic_run, 1, {"NCCL_ALGO": "Tree"}, process_group=False)
    assert "NCCL_ALGO=Tree in the environment: unset it, or set NCCL_ALGO=Ring" in told
