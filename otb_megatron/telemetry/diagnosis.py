"""What `diagnose variance` found, as files, as a page of pictures and as a short text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otb_megatron.telemetry.page import figure, write_page
from otb_megatron.telemetry.plots import PALETTE, Measurement, draw_cloud, draw_measurements, draw_spreads

RESULT_FILE, PAGE_FILE = "variance.json", "variance.html"
_SVG = "image/svg+xml"
_UNKNOWN = "-"
# The pictures show the estimators that people choose between. Others are in the numbers: variants of these, and one with another goal (pass@k).
_PICTURED = (
    "optimal_token_baseline",
    "optimal_token_baseline_loo",
    "optimal_token_baseline_true_energy",
    "optimal_global_baseline",
    "opo",
    "grpo",
    "rloo",
    "reinforce_plus_plus",
)
# Their bias is an error. That of the others is also another scale, which a learning rate makes up for.
_BIASED = ("optimal_token_baseline", "optimal_token_baseline_true_energy", "optimal_global_baseline", "opo")


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        widths = [max(len(row[column]) for row in (self.header, *self.rows)) for column in range(len(self.header))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()
            for row in (self.header, *self.rows)
        ]
        return "\n".join([self.title, *lines])

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.header)
        body = "\n".join(f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>" for row in self.rows)
        table = f'<table class="numbers">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>'
        return f"<section>\n<h2>{html.escape(self.title)}</h2>\n{table}\n</section>"


def write_diagnosis(directory: Path, result: dict[str, Any], energy: np.ndarray, squared_norm: np.ndarray) -> str:
    """Writes variance.json, its pictures as SVG files, and variance.html with all of them.

    Args:
        directory: an existing one.
        result: as docs/diagnose.md describes it.
        energy, squared_norm: [actions], w_t and |s_t|^2.

    Returns:
        The tables for the terminal.
    """
    text = _json(result)
    (directory / RESULT_FILE).write_text(text + "\n")
    pictures = _pictures(result, energy, squared_norm)
    for name, (_, picture) in pictures.items():
        (directory / f"{name}.svg").write_bytes(picture)
    tables = [_variance_table(result), _bias_table(result), _energy_table(result)]
    figures = "\n".join(figure(title, picture, alt=title, media_type=_SVG) for title, picture in pictures.values())
    details = f"<details>\n<summary>All numbers</summary>\n<pre>{html.escape(text)}</pre>\n</details>\n"
    sections = "\n".join([f'<div class="pictures">\n{figures}\n</div>', *(table.html() for table in tables), details])
    data = result["data"]
    summary = f"{data['prompts']} prompts · {data['responses']} responses · {data['tokens']} tokens · mean reward {data['mean_reward']:.3g}"
    write_page(directory / PAGE_FILE, title=f"Gradient variance of {result['model']['path']}", summary=summary, sections=sections)
    return "\n\n".join(table.text() for table in tables)


def _json(result: dict[str, Any]) -> str:
    """Indented, with a list of numbers on one line."""
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), json.dumps(result, indent=1))


def _pictures(result: dict[str, Any], energy: np.ndarray, squared_norm: np.ndarray) -> dict[str, tuple[str, bytes]]:
    """File name -> title and SVG."""
    found = {}
    for name, quantity, shown, title, y_label, log_y in (
        ("variance", "relative_variance", _PICTURED, "Variance of a group's gradient", "variance / squared mean gradient", True),
        ("variance_to_rloo", "relative_to_rloo", _PICTURED, "The same, relative to RLOO", "relative variance / RLOO's", True),
        ("bias", "relative_bias_squared", _BIASED, "Bias against leave-one-out", "squared bias / squared mean gradient", False),
    ):
        measured = [_measurement(result, estimator, quantity) for estimator in shown]
        measured = [one for one in measured if np.isfinite(one.intervals[:, 0]).any()]
        if measured:
            found[name] = (title, draw_measurements(measured, x_label="N, responses in a group", y_label=y_label, log_y=log_y))
    spreads = {
        f"{level}, {kind}": fit["ratio_quantiles"]
        for level, kinds in result["energy"].items()
        for kind, fit in kinds.items()
        if None not in fit["ratio_quantiles"]
    }
    if spreads:
        picture = draw_spreads(spreads, x_label="squared score norm / energy, relative to the median")
        found["energy_ratio"] = ("Squared score norm over energy: 5, 25, 50, 75 and 95 %", picture)
    found["energy"] = ("Energy against the true squared score norm", draw_cloud(energy, squared_norm, x_label="energy w", y_label="squared norm of the score"))
    return found


def _measurement(result: dict[str, Any], estimator: str, quantity: str) -> Measurement:
    of_size = result["estimators"][estimator]
    intervals = np.array([entry[quantity] for entry in of_size.values()], dtype=np.float64)  # None becomes NaN
    color = PALETTE[_PICTURED.index(estimator)]
    return Measurement(estimator, color, np.array([float(size) for size in of_size]), intervals)


def _variance_table(result: dict[str, Any]) -> Table:
    estimators = result["estimators"]
    sizes = list(estimators["rloo"])
    rows = [["rloo", *(_interval(estimators["rloo"][size]["relative_variance"]) for size in sizes)]]
    rows += [[f"{name} / rloo", *(_interval(of_size[size]["relative_to_rloo"]) for size in sizes)] for name, of_size in estimators.items() if name != "rloo"]
    return Table("variance of a group's gradient / its squared mean", ["estimator", *(f"N={size}" for size in sizes)], rows)


def _bias_table(result: dict[str, Any]) -> Table:
    rows = [
        [f"N={size}", _interval(of_size["relative_bias_squared"]), _interval(of_size["cosine"]), _interval(of_size["scale"])]
        for size, of_size in result["estimators"]["optimal_token_baseline"].items()
    ]
    return Table("optimal_token_baseline against leave-one-out", ["", "squared bias / squared mean", "cosine of means", "scale of mean"], rows)


def _energy_table(result: dict[str, Any]) -> Table:
    rows = [
        [
            f"{level}, {kind}",
            _number(fit["share"]),
            _interval(fit["rank_correlation"]),
            _interval(fit["rank_correlation_within_step"]),
            _range(fit["ratio_quantiles"]),
        ]
        for level, kinds in result["energy"].items()
        for kind, fit in kinds.items()
    ]
    header = ["", "share", "rank correlation", "within a step", "ratio, 5 to 95 %"]
    return Table("energy (w for a token, W cumulative) against the true squared score norm", header, rows)


def _interval(numbers: Sequence[float | None]) -> str:
    estimate, low, high = numbers
    if estimate is None:
        return _UNKNOWN
    return f"{estimate:.2f} [{_number(low)}, {_number(high)}]"


def _range(quantiles: Sequence[float | None]) -> str:
    return f"{_number(quantiles[0])} to {_number(quantiles[-1])}"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.2f}"
