"""report.html: the curves and facts of a run on one page that needs no other file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
import yaml

from otb_megatron.telemetry.columns import ACCURACY, REWARD, TIME_PREFIX, TOTAL_TIME, phase_columns
from otb_megatron.telemetry.jsonl import METRICS_FILE, read_steps
from otb_megatron.telemetry.page import figure, write_page
from otb_megatron.telemetry.plots import OTHER, PALETTE, Series, draw_curves, draw_stack
from otb_megatron.telemetry.recorder import RUN_FILE
from otb_megatron.types import UserError

REPORT_FILE = "report.html"
LOSS = "loss/total"

Row = dict[str, Any]  # {"step": int, metric: float | None}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A metric that the report shows."""

    key: str
    label: str
    title: str  # over its picture
    unit: str
    best: Literal["highest", "lowest"] | None = None  # None where neither end is better


QUANTITIES = (
    Quantity(LOSS, "loss", "Loss", "nats per token", "lowest"),
    Quantity(REWARD, "reward", "Reward", "reward", "highest"),
    Quantity(ACCURACY, "held-out accuracy", "Held-out accuracy", "fraction right", "highest"),
    Quantity("response/length", "response length", "Response length", "tokens"),
    Quantity("policy/entropy", "entropy", "Policy entropy", "nats"),
    Quantity("optimizer/grad_norm", "gradient norm", "Gradient norm", "norm before clipping"),
    Quantity("critic/explained_variance", "explained variance", "Critic", "1 - Var(error) / Var(return)", "highest"),
    Quantity("policy/energy", "energy", "Mean energy", "mean of w per action"),
    Quantity("rollout/log_prob_difference", "|train - rollout| log-prob", "Trainer against rollout engine", "nats"),
    Quantity(TOTAL_TIME, "seconds per step", "Time per step", "seconds"),
)


def write_report(output_dir: Path) -> Path:
    """Writes `<output_dir>/report.html` from the run's metrics.jsonl and run.json, finished or not.

    Raises:
        UserError: there is no run in the directory, or no step of it yet.
    """
    metrics_file, run_file = output_dir / METRICS_FILE, output_dir / RUN_FILE
    missing = [path.name for path in (metrics_file, run_file) if not path.exists()]
    if missing:
        raise UserError(f"{output_dir} has no {' and no '.join(missing)}; name the trainer.output_dir of a run")
    rows = read_steps(metrics_file)
    if not rows:
        raise UserError(f"{metrics_file} holds no step yet; run the report again after the first one")
    facts = json.loads(run_file.read_text())
    sections = Template(_SECTIONS).substitute(
        pictures="\n".join(_pictures(rows)),
        table=_table(rows),
        facts=_facts(rows, facts),
        config=html.escape("not recorded" if facts["config"] is None else yaml.safe_dump(facts["config"], sort_keys=False)),
    )
    return write_page(output_dir / REPORT_FILE, title=output_dir.resolve().name, summary=_summary(rows, facts), sections=sections)


def _shown(rows: Sequence[Row]) -> list[Quantity]:
    """The quantities that the run has. Beside a reward the loss is left out: that of a policy is about 0 by construction."""
    present = {key for row in rows for key in row}
    return [q for q in QUANTITIES if q.key in present and not (q.key == LOSS and REWARD in present)]


def _series(rows: Sequence[Row], quantity: Quantity, color: str = PALETTE[0]) -> Series:
    having = [row for row in rows if quantity.key in row]
    return Series(
        label=quantity.label,
        color=color,
        steps=np.array([row["step"] for row in having], dtype=np.int64),
        values=np.array([row[quantity.key] for row in having], dtype=np.float64),  # None becomes NaN
        smoothed=quantity.key != ACCURACY,
    )


def _pictures(rows: Sequence[Row]) -> list[str]:
    step_range = (rows[0]["step"], rows[-1]["step"])
    figures = []
    for title, group in _grouped(rows, _shown(rows)):
        every = [_series(rows, quantity, PALETTE[index]) for index, quantity in enumerate(group)]
        drawn = [one for one in every if one.is_finite]
        if drawn:
            figures.append(figure(title, draw_curves(drawn, group[0].unit, step_range), alt=f"{title} over steps", note=_gaps(every)))
    phases = _phase_seconds(rows)
    if phases:
        picture = draw_stack(phases, np.array([row["step"] for row in rows]))
        figures.append(figure("Time per phase", picture, alt="Time per phase over steps", wide=True))
    return figures


def _grouped(rows: Sequence[Row], quantities: list[Quantity]) -> list[tuple[str, list[Quantity]]]:
    """Title and quantities of each picture. Reward and accuracy share one where one axis suits both."""
    by_key = {q.key: q for q in quantities if q.key != TOTAL_TIME}  # the time has its own picture, by phase
    groups = []
    if REWARD in by_key and ACCURACY in by_key:
        rewards = _series(rows, by_key[REWARD]).values
        if not (np.abs(rewards) > 1).any():
            groups.append(("Reward and held-out accuracy", [by_key.pop(REWARD), by_key.pop(ACCURACY)]))
    return groups + [(q.title, [q]) for q in by_key.values()]


def _phase_seconds(rows: Sequence[Row]) -> dict[str, np.ndarray]:
    """Phase -> float64 [rows]; what the step took beyond its phases is "other"."""
    columns = phase_columns([key for row in rows for key in row])
    phases = {column.key.removeprefix(TIME_PREFIX): _filled(rows, column.key) for column in columns}
    other = _filled(rows, TOTAL_TIME) - sum(phases.values(), np.zeros(len(rows)))
    other = other.clip(min=0)
    return phases | {OTHER: other} if other.any() else phases


def _filled(rows: Sequence[Row], key: str) -> np.ndarray:
    return np.array([row.get(key) or 0.0 for row in rows], dtype=np.float64)


def _gaps(series: Sequence[Series]) -> str:
    notes = []
    for one in series:
        steps = one.steps[~np.isfinite(one.values)]
        if len(steps):
            notes.append(f"{one.label}: not a finite number at step {steps[0]}" + (f" and {len(steps) - 1} more" if len(steps) > 1 else ""))
    return "; ".join(notes)


def _table(rows: Sequence[Row]) -> str:
    """First, last and best of each quantity, with their steps."""
    lines = []
    for quantity in _shown(rows):
        series = _series(rows, quantity)
        best = "<td>&ndash;</td>"
        if quantity.best is not None and series.is_finite:
            best = _value_cell(series, int(np.nanargmax(series.values) if quantity.best == "highest" else np.nanargmin(series.values)))
        lines.append(f"<tr><th>{html.escape(quantity.label)}</th>{_value_cell(series, 0)}{_value_cell(series, -1)}{best}</tr>")
    return "\n".join(lines)


def _value_cell(series: Series, index: int) -> str:
    return f'<td>{series.values[index]:.4g} <span class="step">step {series.steps[index]}</span></td>'


def _summary(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    parts = [f"{rows[-1]['step']} of {facts['num_steps']} steps"]
    for quantity in _shown(rows):
        if quantity.best is not None:
            values = _series(rows, quantity).values
            parts.append(f"{quantity.label} {values[0]:.3g}" + (f" → {values[-1]:.3g}" if len(values) > 1 else ""))
    return " · ".join(parts)


def _facts(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    starts = facts["starts"]
    wall_s = _filled(rows, TOTAL_TIME).sum()
    items = {
        "steps": f"{rows[-1]['step']} of {facts['num_steps']}",
        "wall time in steps": f"{wall_s / 3600:.2f} h" if wall_s >= 3600 else f"{wall_s:.1f} s",
        "started": "; ".join(f"{start['time'].replace('T', ' ')} at step {start['first_step']}" for start in starts),
        "versions": ", ".join(f"{name} {version}" for name, version in starts[-1]["versions"].items()),
    }
    return "\n".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in items.items())


_SECTIONS = """<div class="pictures">
$pictures
</div>
<section>
<h2>First, last, best</h2>
<table class="numbers">
<thead><tr><th></th><th>first</th><th>last</th><th>best</th></tr></thead>
<tbody>
$table
</tbody>
</table>
</section>
<section>
<h2>Run</h2>
<table>
<tbody>
$facts
</tbody>
</table>
</section>
<details>
<summary>Settings</summary>
<pre>$config</pre>
</details>
"""
