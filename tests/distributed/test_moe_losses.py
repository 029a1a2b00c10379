"""The gradient of auxiliary load-balancing losses and of the z-loss, against their published formulas in transformers' float64.

The loss of a pack is E * sum_i f_i P_i with means over the pack's tokens (arXiv 2101.03961), and packs count in proportion to their
tokens. Padding, which every layout adds in its own way, must count nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launcher import run_ranks
from tests.distributed.moe_gradients import NUM_EXPERTS, NUM_LAYERS, PACKS, TOPK, Penalty, Step, difference, megatron_step, samples, transformers_step
from tests.distributed.training import settings
from tests.models import make_model

COEFFICIENTS = {"aux_loss": 0.7, "seq_aux_loss": 0.6, "global_aux_loss": 0.5, "z_loss": 0.4}
SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one": (1, {}, {}),
    "full recompute": (1, {}, FULL),
    "dp2": (2, {}, {}),
    "cp2": (2, dict(context_parallel_size=2), {}),
    "tp2_sp": (2, SP, SELECTIVE),
    "pp2": (2, dict(pipeline_model_parallel_size=2), FULL),
    "pp2_vpp2": (2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), {}),
    "tp2_sp_cp2_ep2": (4, SP | dict(context_parallel_size=2, expert_model_parallel_size=2), {}),
}


def fractions(logits: Tensor) -> Tensor:
    """f_i: the part of all choices of these tokens that fell on expert i."""
    return torch.nn.functional.one_hot(logits.topk(TOPK).indices, NUM_EXPERTS).sum((0, 1)) / (TOPK * len(logits))


def balance(logits: Tensor, f: Tensor) -> Tensor:
    """E sum_i f_i P_i over these tokens."""
    return NUM_EXPERTS * (f * logits.softmax(-1).mean(0)).sum()


def weighted(terms: list[tuple[int, Tensor]]) -> Tensor:
    return sum(n * term for n, term in terms) / sum(n for n, _ in terms)  # type: ignore[return-value]


def of_packs(packs: list[list[int]], dp: int) -> dict[str, Any]:
    """kind -> the loss of one layer, given its logits of each sample."""

    def pack_loss(layer: list[Tensor]) -> Tensor:
        joined = [torch.cat([layer[s] for s in pack]) for pack in packs if pack]
        return weighted([(len(x), balance(x, fractions(x))) for x in joined])

    def sequence_loss(layer: list[Tensor]) -> Tensor:
        return weighted([(len(x), balance(x, fractions(x))) for x in layer])

    def global_loss(layer: list[Tensor]) -> Tensor:
        terms, seen = [], []
        for start in range(0, len(packs), dp):
            together = [layer[s] for pack in packs[start : start + dp] for s in pack]
            seen += together
            if together:
                x = torch.cat(together)
                terms.append((len(x), balance(x, fractions(torch.cat(seen)))))
        return weighted(terms)

    def z_loss(layer: list[Tensor]) -> Tensor:
        return torch.cat(layer).logsumexp(-1).square().mean()

    return {"aux_loss": pack_loss, "seq_aux_loss": sequence_loss, "global_aux_loss": global_loss, "z_loss": z_loss}


def penalty(kinds: Sequence[str], dp: int, values: dict[str, float]) -> Penalty:
    """The sum of the losses of all layers, with their coefficients; their means over layers go into `values`."""

    def loss(logits: list[list[Tensor]]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for kind in kinds:
            of_layers = sum(of_packs(PACKS, dp)[kind](layer) for layer in logits)
            values[f"moe/{kind}"] = of_layers.item() / NUM_LAYERS
            total = total + COEFFICIENTS[kind] * of_layers
        return total

    return loss


def megatron(kinds: Sequence[str]) -> dict[str, Any]:
    balancing = [kind for kind in kinds if kind != "z_loss"]
    fields: dict[str, Any] = {"moe_z_loss_coeff": COEFFICIENTS["z_loss"]} if "z_loss" in kinds else {}
    if len(balancing) == 1:
        fields |= {"moe_router_load_balancing_type": balancing[0], "moe_aux_loss_coeff": COEFFICIENTS[balancing[0]]}
    elif balancing:
        fields |= {"moe_router_load_balancing_type": balancing, "moe_aux_loss_coeff": [COEFFICIENTS[kind] for kind in balancing]}
    return fields


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    make_model(directory / "model", "qwen3_moe")
    return directory


def run(work: Path, kinds: Sequence[str], layout: str, packs: list[list[int]] = PACKS) -> Step:
    world_size, parallel, more = LAYOUTS[layout]
    values = settings(work / "model", work, parallel=parallel, megatron=megatron(kinds) | more, optimizer={"use_distributed_optimizer": False})
    return run_ranks(megatron_step, world_size, values, samples(recorded=False), packs, timeout_s=240)[0]


def check(work: Path, kinds: Sequence[str], layout: str) -> None:
    values: dict[str, float] = {}
    expected = transformers_step(work / "model", samples(recorded=False), penalty(kinds, 2 if layout == "dp2" else 1, values))
    found = run(work, kinds, layout)
    assert difference(found, expected) < 5e-5
    assert {name: found.metrics[name] for name in values} == pytest.approx(values, rel=1e-5)
    without = transformers_step(work / "model", samples(recorded=False))
    assert difference(without, expected) > 0.05  # so a loss that is off by one percent shows


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_each_loss_is_that_of_the_formula(work: Path, kind: str) -> None:
    check(work, [kind], "one")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_losses_together_are_those_of_the_formulas_in_every_layout(work: Path, layout: str) -> None:
    check(work, list(COEFFICIENTS), layout)


def test_what_does_not_depend_on_the_microbatches(work: Path) -> None:
    """The loss of a pack compares the tokens that happen to be in it; those of a sequence and of a token do not change with the packing."""
    other = [[0, 1, 2, 3, 4]]
    assert difference(run(work, ["seq_aux_loss", "z_loss"], "one", other), run(work, ["seq_aux_loss", "z_loss"], "one")) < 1e-5
    assert difference(run(work, ["aux_loss"], "one", other), run(work, ["aux_loss"], "one")) > 1e-3
