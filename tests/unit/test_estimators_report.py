"""The numbers on the page of the estimators' experiment, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from otb_megatron.types import UserError
from tools.experiments.estimators import RESULTS_FILE, Cell, finished, grid
from tools.experiments.estimators_report import collapsed, mean_accuracy, sign_flip_p, tokens_to_target, write_report

DOCS = Path(__file__).parents[2] / "docs"


def row(seed: int, estimator: str, n: int, accuracy: list[float], norm: float = 1.0) -> dict:
    steps = [5 * i for i in range(len(accuracy))]
    flat = [1.0] * steps[-1]
    return {
        "cell": {"seed": seed, "estimator": estimator, "n": n},
        "eval_step": steps,
        "accuracy": accuracy,
        "tokens": [100] * steps[-1],
        "gradient_norm": [norm] * len(flat),
        "variance_proxy": flat,
    }


def test_sign_flips_by_hand() -> None:
    """Of the 8 patterns of (1, 2, 3), those with a sum of at least 6 in size are + + + and - - -; (1, -1, 2): all but two of size 4 and 2, 2, 0."""
    assert sign_flip_p([1, 2, 3]) == 2 / 8
    assert sign_flip_p([1, -1, 2]) == 6 / 8
    assert sign_flip_p([0, 0]) == 1.0


def test_the_area_and_the_tokens_by_hand() -> None:
    """Trapezoids over 5 steps each: (0.5 + 0.7)/2 and (0.7 + 0.9)/2 average to 0.7; 0.9 is reached at step 10, after 1,000 tokens."""
    one = row(0, "otb", 4, [0.5, 0.7, 0.9])
    assert mean_accuracy(one) == pytest.approx(0.7)
    assert tokens_to_target(one) == 1000.0 and tokens_to_target(row(0, "otb", 4, [0.5, 0.7])) == float("inf")


def test_a_collapse_is_a_fall_below_the_own_best() -> None:
    assert collapsed(row(0, "otb", 4, [0.5, 0.9, 0.8])) and not collapsed(row(0, "otb", 4, [0.5, 0.9, 0.86]))


def test_the_page_keeps_its_text_and_gets_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: begin -->\nold\n<!-- results: end -->\nafter\n")
    rows = [row(seed, name, n, [0.5, 0.6 + 0.1 * (name == "otb"), 0.9]) for seed in (0, 1) for name in ("otb", "rloo") for n in (4, 32)]
    write_report(rows, page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 4 | otb | 0.900 ± 0.000 | 0.700 ± 0.000 | 1,000 (2/2) |" in text and " | 0% | 0 |" in text
    assert "| otb N=4 less each at N=32 | +0.0000 (p=1.00) | +0.0500 (p=0.50) |" in text
    assert (tmp_path / "page_n4.png").read_bytes().startswith(b"\x89PNG")
    write_report([*rows, row(2, "otb", 4, [0.5, 0.5, 0.5])], page)
    assert page.read_text() == text  # seed 2 has not ended
    page.write_text("no marks")
    with pytest.raises(UserError, match="must hold the lines"):
        write_report(rows, page)


def test_runs_with_another_bound_of_the_gradient_have_tables_of_their_own(tmp_path: Path) -> None:
    """A norm of 2 is above the bound of 1. Of three seeds one that does not reach the target leaves the median, and two do not."""
    page = tmp_path / "page.md"
    page.write_text("<!-- results: begin -->\n<!-- results: end -->\n")
    curves = {0: [0.5, 0.9, 0.9], 1: [0.5, 0.6, 0.9], 2: [0.5, 0.6, 0.6]}
    rows = [row(seed, "otb", 4, curve, norm=2.0) for seed, curve in curves.items()]
    free = [row(seed, "otb", 4, [0.5, 0.6, 0.9 * (seed == 0)], norm=2.0) for seed in curves]
    for one in free:
        one["cell"]["clip_grad"] = 0.0
    write_report(rows + free, page)
    bounded, unbounded = page.read_text().split("**Gradient norm not bounded.**")
    assert bounded.startswith("<!-- results: begin -->\n**Gradient norm bounded by 1.** 3 runs")
    assert "| 1,000 (2/3) |" in bounded and "| 100% | 0 |" in bounded
    assert "| - (1/3) |" in unbounded and "| - | 2 |" in unbounded


def test_the_committed_page_follows_from_the_committed_results(tmp_path: Path) -> None:
    page = tmp_path / "experiments.md"
    page.write_text((DOCS / "experiments.md").read_text())
    write_report(list(finished(DOCS / "experiments" / RESULTS_FILE).values()), page)
    assert page.read_text() == (DOCS / "experiments.md").read_text()


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text('{"cell": {"seed": 0, "estimator": "otb", "n": 4}}\n{"cell": {"seed": 0, "esti')
    assert set(finished(results)) == {Cell(0, "otb", 4)}
    assert len(grid(5)) == 5 * 6 * 3
    assert set(grid(1, [4], clip_grad=0.0)).isdisjoint(grid(1))
