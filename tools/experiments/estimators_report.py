"""The page of the estimators' experiment: tables and pictures from its results, and the test of a paired difference."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otb_megatron.telemetry.plots import PALETTE, Series, draw_curves
from otb_megatron.types import UserError

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
TARGET_ACCURACY = 0.9
COLLAPSE = 0.05  # a run that ends this far below its own best has collapsed
OURS = "otb"
Row = dict[str, Any]


def final_accuracy(row: Row) -> float:
    return row["accuracy"][-1]


def mean_accuracy(row: Row) -> float:
    """Area under the accuracy curve by the trapezoidal rule, divided by the number of steps."""
    steps = row["eval_step"]
    return float(np.trapezoid(row["accuracy"], steps)) / (steps[-1] - steps[0])


def tokens_to_target(row: Row) -> float:
    """Tokens sampled up to the first evaluation at TARGET_ACCURACY or above; infinity where there is none."""
    step = next((step for step, accuracy in zip(row["eval_step"], row["accuracy"], strict=True) if accuracy >= TARGET_ACCURACY), None)
    return float("inf") if step is None else float(sum(row["tokens"][:step]))


def clip_grad(row: Row) -> float:
    """The bound of the gradient's norm that the run had; the first results do not name theirs, 1."""
    return row["cell"].get("clip_grad", 1.0)


def collapsed(row: Row) -> bool:
    return final_accuracy(row) < max(row["accuracy"]) - COLLAPSE


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of a mean of paired differences under the hypothesis that each is as likely to have the other sign.

    Exact, over all 2^pairs sign patterns: with 5 pairs no value is below 2/32.
    """
    values = np.asarray(differences, dtype=np.float64)
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(values))))
    means = np.abs(signs @ values)
    return float(np.mean(means >= abs(values.sum()) - 1e-12))


def write_report(rows: list[Row], page: Path) -> None:
    """Replaces the results in `page`, between its two marks, and draws the pictures beside it. A seed whose runs have not all ended waits."""
    if not rows:
        raise UserError("there are no results yet; run the experiment without --report first")
    text = page.read_text() if page.exists() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise UserError(f"{page} must hold the lines {BEGIN} and {END} once; the results go between them")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    by_bound = {bound: _of_whole_seeds([row for row in rows if clip_grad(row) == bound]) for bound in sorted(set(map(clip_grad, rows)), reverse=True)}
    lines = [line for bound, of_bound in by_bound.items() for line in _results(of_bound, bound)]
    page.write_text(before + "\n".join([BEGIN, *lines, *_pictures(next(iter(by_bound.values())), page), END]) + after)


def _of_whole_seeds(rows: list[Row]) -> list[Row]:
    """The rows of the seeds that have as many as any; a mean over some of the seeds here and over others there would compare the seeds."""
    counts = Counter(row["cell"]["seed"] for row in rows)
    return [row for row in rows if counts[row["cell"]["seed"]] == max(counts.values())]


def _results(rows: list[Row], bound: float) -> list[str]:
    """The tables of the runs whose gradients were clipped at `bound`."""
    sizes = sorted({row["cell"]["n"] for row in rows})
    names = list(dict.fromkeys(row["cell"]["estimator"] for row in rows))
    seeds = sorted({row["cell"]["seed"] for row in rows})
    title = f"Gradient norm bounded by {bound:g}" if bound else "Gradient norm not bounded"
    lines = [f"**{title}.** {len(rows)} runs: {len(seeds)} seeds, {rows[0]['eval_step'][-1]} steps each. Mean over seeds, with its standard error.", ""]
    columns = ["N", "estimator", "final accuracy", "mean accuracy over the run", "median tokens to 90 % (seeds)"]
    columns += ["variance proxy", "gradient norm", "clipped", "collapsed"]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for n, name in itertools.product(sizes, names):
        cells = _cells(rows, name, n)
        tokens = sorted(map(tokens_to_target, cells.values()))
        median = tokens[len(tokens) // 2] if tokens else float("inf")  # infinity where not even half of the seeds got there; the upper one of two
        reached = f"{median:,.0f}" if np.isfinite(median) else "-"
        clipped = f"{np.mean([norm > bound for row in cells.values() for norm in row['gradient_norm']]):.0%}" if bound and cells else "-"
        lines.append(
            f"| {n} | {name} | {_mean(cells, final_accuracy)} | {_mean(cells, mean_accuracy)} | {reached} ({np.isfinite(tokens).sum()}/{len(cells)}) "
            f"| {_mean(cells, lambda row: float(np.mean(row['variance_proxy'])), 4)} | {_mean(cells, lambda row: float(np.mean(row['gradient_norm'])))} "
            f"| {clipped} | {sum(map(collapsed, cells.values()))} |"
        )
    lines += ["", f"Differences in mean accuracy over the run, paired by seed, with the p-value of an exact sign-flip test ({len(seeds)} pairs: none below"]
    lines += [f"{2 / 2 ** len(seeds):.3f}). Positive: {OURS} is better.", "", "| comparison | " + " | ".join(name for name in names) + " |"]
    lines += ["|---" * (len(names) + 1) + "|"]
    for n in sizes:
        lines.append(_compared(rows, names, n, n))
    if len(sizes) > 1:
        lines.append(_compared(rows, names, sizes[0], sizes[-1]))
    return [*lines, ""]


def _pictures(rows: list[Row], page: Path) -> list[str]:
    """Draws one for each N and returns the lines that show them."""
    lines: list[str] = []
    for n in sorted({row["cell"]["n"] for row in rows}):
        picture = page.with_name(f"{page.stem}_n{n}.png")
        names = dict.fromkeys(row["cell"]["estimator"] for row in rows)
        series = [_curve(_cells(rows, name, n), name, color) for name, color in zip(names, PALETTE, strict=False)]
        picture.write_bytes(draw_curves(series, f"held-out accuracy, N={n}", (0, rows[0]["eval_step"][-1])))
        lines += [f"![Held-out accuracy over the steps with N={n}]({picture.name})", ""]
    return lines[:-1]


def _compared(rows: list[Row], names: list[str], our_n: int, their_n: int) -> str:
    """One line of differences: ours at `our_n` responses a prompt less each estimator at `their_n`."""
    ours, parts = _cells(rows, OURS, our_n), []
    for name in names:
        theirs = _cells(rows, name, their_n)
        differences = [mean_accuracy(ours[seed]) - mean_accuracy(theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
        same = name == OURS and our_n == their_n
        parts.append("" if same or not differences else f"{np.mean(differences):+.4f} (p={sign_flip_p(differences):.2f})")
    return f"| {OURS} N={our_n} less each at N={their_n} | " + " | ".join(parts) + " |"


def _cells(rows: list[Row], name: str, n: int) -> dict[int, Row]:
    """Seed -> result."""
    return {row["cell"]["seed"]: row for row in rows if (row["cell"]["estimator"], row["cell"]["n"]) == (name, n)}


def _mean(cells: dict[int, Row], value: Callable[[Row], float], digits: int = 3) -> str:
    values = [value(row) for row in cells.values()]
    if not values:
        return "-"
    error = f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{error}"


def _curve(cells: dict[int, Row], name: str, color: str) -> Series:
    rows = list(cells.values())
    return Series(name, color, np.array(rows[0]["eval_step"]), np.mean([row["accuracy"] for row in rows], axis=0), smoothed=False)
