"""The same recorded samples give the same advantages, gradients, metrics and weights in every parallel layout.

The reference is one process. Differences are float32 rounding: each layout sums in another order. Here is the representative part of the
table; `make test-layouts` runs all of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.layouts import CASES, DENSE, LAYOUTS, QUICK_CASES, TOLERANCE, Difference, Layout, Reference, measure
from tests.distributed.training import largest_difference
from tools.layouts import PAGE, read_table


@pytest.mark.parametrize(("layout", "model"), QUICK_CASES, ids=lambda value: value if isinstance(value, str) else value.name)
def test_layout_equals_one_process(references: dict[str, Reference], tmp_path: Path, layout: Layout, model: str) -> None:
    difference = measure(layout, references[model], tmp_path)
    assert difference.largest < TOLERANCE, difference


FAMILIES = {  # layouts, and how many times TOLERANCE the first gradient and the weights may differ by
    "glm4_moe": (["TP2 + SP, EP2"], 1),
    "gpt_oss_moe": (["TP2 + SP, EP2", "CP2, EP2"], 5),
    "deepseek_v3_moe": (["TP2 + SP", "CP2"], 1),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_layers_of_their_own_train_alike_in_layouts(tmp_path: Path, kind: str) -> None:
    """Shared experts, dense first layers, a frozen routing bias; sinks, windows, and biases of experts and router; compressed queries, keys and values.

    Latents are normalised twice and the router is a sigmoid: what rounding leaves of one step grows twentyfold in the next two.
    The gradient of a router's bias is a sum over all tokens whose terms nearly cancel: 1e-5 of it is rounding.
    """
    names, times = FAMILIES[kind]
    reference = Reference.of(kind, tmp_path / "one")
    for layout in (layout for layout in LAYOUTS if layout.name in names):
        difference = measure(layout, reference, tmp_path / layout.name)
        assert max(difference.first_gradient, difference.weights) < times * TOLERANCE, (layout.name, difference)
        assert difference.largest < 10 * times * TOLERANCE, (layout.name, difference)


def test_the_page_on_parallelism_has_every_layout_within_the_tolerance() -> None:
    """The table is written by `make test-layouts`; a layout that was added or changed its name since then is missing there."""
    table = read_table(PAGE.read_text())
    assert list(table) == [layout.name for layout in LAYOUTS]
    assert {(name, model) for name, by_model in table.items() for model in by_model} == {(layout.name, model) for layout, model in CASES}
    assert all(0 <= number < TOLERANCE for by_model in table.values() for numbers in by_model.values() for number in numbers)


FULL_OBJECTIVE = {
    "advantage": "rloo",
    "aggregation": "seq-mean-token-mean",
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "rollout_correction": "truncated",
    "optimizer_steps_per_rollout": 2,
}


def test_every_term_of_the_objective_is_free_of_the_layout(references: dict[str, Reference], tmp_path: Path) -> None:
    """KL, entropy bonus, correction weights, two optimizer steps a rollout and another aggregation, at TP2 x CP2 with SP."""
    reference = references[DENSE]
    parallel = dict(tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    one = reference.run(tmp_path / "one", {"algorithm": FULL_OBJECTIVE})
    many = reference.run(tmp_path / "many", {"algorithm": FULL_OBJECTIVE, "parallel": parallel}, 4)
    assert len(one.gradients) == 6
    difference = Difference.between(many, one)
    assert max(difference.first_gradient, difference.weights) < TOLERANCE and difference.largest < 3 * TOLERANCE, difference


def test_bfloat16_trains_in_any_layout_within_its_rounding(references: dict[str, Reference], tmp_path: Path) -> None:
    """Float32 masters and gradients: TP2 differs from one process by bfloat16 rounding (8 bits, 2^-8 = 0.4 %) of activations and weights."""
    sections = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-3}}
    one = references[DENSE].run(tmp_path / "one", sections)
    two = references[DENSE].run(tmp_path / "two", sections | {"parallel": {"tensor_model_parallel_size": 2}}, 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in two.weights.values())
    assert largest_difference(two.weights, one.weights) < 0.02
    assert two.metrics[0]["policy/entropy"] == pytest.approx(one.metrics[0]["policy/entropy"], rel=0.02)
