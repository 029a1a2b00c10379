"""Pictures, drawn without a display and without matplotlib's global state: curves over steps as PNG, measurements as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

_SMOOTH_FROM_POINTS = 60  # above, the eye wants a trend: the points turn pale under their running mean
_MARK_UP_TO_POINTS = 40  # below, each point gets a dot, so that one alone can be seen
_MAX_BARS = 200
_LOG_SCALE_RATIO = 30.0  # of the largest value to the median; a linear axis would show one spike and a flat line
# Okabe and Ito's colours, which the colour-blind can tell apart, then their paler forms.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#555555", "#80b9d9", "#eaae80", "#80cfb9", "#f2cf80")
OTHER = "other"  # time outside the named phases
_OTHER_COLOR = "#c8c8c8"


@dataclass(frozen=True, slots=True)
class Series:
    """A metric at the steps that have it."""

    label: str
    color: str
    steps: np.ndarray  # int64 [points], ascending
    values: np.ndarray  # float64 [points]; NaN where the run gave no finite number
    smoothed: bool = True  # a running mean where there are many points; not for what is measured now and then

    @property
    def is_finite(self) -> bool:
        """Whether there is anything to draw."""
        return bool(np.isfinite(self.values).any())


def draw_curves(series: Sequence[Series], unit: str, step_range: tuple[int, int]) -> bytes:
    """Lines over the steps, each with a gap where it has no finite value.

    Args:
        series: at least one, each with at least one finite value.
        unit: label of the vertical axis.
        step_range: first and last step of the run, the same in every picture of a report.

    Returns:
        A PNG file.
    """
    figure, axes = _new_figure(step_range)
    for one in series:
        count = len(one.steps)
        if not one.smoothed or count <= _SMOOTH_FROM_POINTS:
            marker = "o" if count <= _MARK_UP_TO_POINTS else None
            axes.plot(one.steps, one.values, color=one.color, linewidth=1.5, marker=marker, markersize=4, label=one.label)
        else:
            window = smoothing_window(count)
            axes.plot(one.steps, one.values, color=one.color, linewidth=0.7, alpha=0.3)
            axes.plot(one.steps, running_mean(one.values, window), color=one.color, linewidth=1.7, label=f"{one.label}, mean of {window} steps")
    values = np.concatenate([one.values[np.isfinite(one.values)] for one in series])
    if values.min() > 0 and values.max() > _LOG_SCALE_RATIO * np.median(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(*vertical_range(float(values.min()), float(values.max())))
    axes.set_ylabel(unit)
    return _finish(figure, axes)


@dataclass(frozen=True, slots=True)
class Measurement:
    """A quantity measured at several places, with confidence intervals."""

    label: str
    color: str
    places: np.ndarray  # [points], positive
    intervals: np.ndarray  # float64 [points, 3]: estimate, low, high; NaN where unknown


def draw_measurements(measurements: Sequence[Measurement], *, x_label: str, y_label: str, log_y: bool) -> bytes:
    """Lines over a logarithmic axis, with error bars side by side.

    Returns:
        An SVG file.
    """
    figure, axes = _new_axes(6.4, 3.8)
    axes.set_xscale("log", base=2)
    for index, one in enumerate(measurements):
        estimate, low, high = one.intervals.T
        beside = one.places * 2 ** (0.035 * (index - (len(measurements) - 1) / 2))
        axes.errorbar(
            beside, estimate, (estimate - low, high - estimate), color=one.color, label=one.label, linewidth=1.3, elinewidth=1, marker="o", markersize=3
        )
    if log_y:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted({float(place) for one in measurements for place in one.places})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return _finish(figure, axes, "svg", legend_columns=3)


def draw_spreads(rows: dict[str, Sequence[float]], *, x_label: str) -> bytes:
    """For each row a line over the outer two of five quantiles, a thick one over the inner two, and a dot at the median; logarithmic.

    Returns:
        An SVG file.
    """
    figure, axes = _new_axes(6.4, 0.9 + 0.32 * len(rows))
    for place, quantiles in enumerate(rows.values()):
        lowest, lower, median, upper, highest = quantiles
        axes.hlines(place, lowest, highest, color=PALETTE[0], linewidth=1.2)
        axes.hlines(place, lower, upper, color=PALETTE[0], linewidth=5)
        axes.plot(median, place, "o", color="white", markeredgecolor=PALETTE[0], markersize=5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(x_label)
    return _finish(figure, axes, "svg")


def draw_cloud(x: np.ndarray, y: np.ndarray, *, x_label: str, y_label: str) -> bytes:
    """How many points lie where, on two logarithmic axes. Points that are not positive in both are left out.

    Returns:
        An SVG file.
    """
    figure, axes = _new_axes(6.4, 3.8)
    shown = (x > 0) & (y > 0)
    counts = axes.hexbin(x[shown], y[shown], gridsize=45, xscale="log", yscale="log", bins="log", mincnt=1, cmap="viridis", linewidths=0.1)
    figure.colorbar(counts, label="tokens")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return _finish(figure, axes, "svg")


def draw_stack(phases: dict[str, np.ndarray], steps: np.ndarray) -> bytes:
    """Seconds per step by phase as stacked bars; where there are many steps a bar is the mean of as many as needed.

    Args:
        phases: label -> seconds, float64 [steps], 0 where the step has no such phase.
        steps: int64 [steps], ascending.
    """
    per_bar = -(-len(steps) // _MAX_BARS)
    share = 0.8 if len(steps) <= _MARK_UP_TO_POINTS else 1.0  # of a bar's place: gaps between the bars where there are few
    figure, axes = _new_figure((int(steps[0]), int(steps[-1])), width_inches=13.0)
    bottom = 0.0
    for index, (label, seconds) in enumerate(phases.items()):
        color = _OTHER_COLOR if label == OTHER else PALETTE[index % len(PALETTE)]
        left, right, height = bar_means(steps, seconds, per_bar)
        axes.bar((left + right) / 2, height, (right - left + 1) * share, bottom, color=color, label=label)
        bottom = bottom + height
    axes.set_ylabel("seconds per step")
    axes.set_xlabel("step" if per_bar == 1 else f"step; each bar is the mean of {per_bar}")
    return _finish(figure, axes)


def bar_means(steps: np.ndarray, values: np.ndarray, per_bar: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First step, last step and mean value of every `per_bar` neighbours; the last bar may have fewer. [points] -> three of [bars]"""
    starts = np.arange(0, len(steps), per_bar)
    sizes = np.diff([*starts, len(steps)])
    return steps[starts], steps[starts + sizes - 1], np.add.reduceat(values, starts) / sizes


def smoothing_window(num_points: int) -> int:
    """Points in a running mean: odd, a fortieth of all, at least 5."""
    return max(5, num_points // 40 | 1)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over an odd `window`, over fewer values at both ends; NaN counts for nothing. [points] -> [points]"""
    finite = np.isfinite(values)
    kernel = np.ones(window)
    total = np.convolve(np.where(finite, values, 0.0), kernel)[window // 2 : window // 2 + len(values)]
    count = np.convolve(finite, kernel)[window // 2 : window // 2 + len(values)]
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0.5)


def vertical_range(lowest: float, highest: float) -> tuple[float, float]:
    """Limits around the values, no narrower than a tenth of the largest: rounding noise must not look like a trend."""
    span = max(1.1 * (highest - lowest), 0.1 * max(abs(lowest), abs(highest))) or 1.0
    middle = (lowest + highest) / 2
    return middle - span / 2, middle + span / 2


def _new_figure(step_range: tuple[int, int], width_inches: float = 6.4) -> tuple[Figure, Axes]:
    figure, axes = _new_axes(width_inches, 3.0)
    first, last = step_range
    margin = max(0.5, 0.01 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.ticklabel_format(useOffset=False)
    axes.set_xlabel("step")
    return figure, axes


def _new_axes(width_inches: float, height_inches: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width_inches, height_inches), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _finish(figure: Figure, axes: Axes, file_format: str = "png", legend_columns: int = 9) -> bytes:
    """Adds the legend, if there is anything to name, above the axes, where it covers no data, and renders."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=legend_columns, frameon=False, fontsize=8, handlelength=1.2, columnspacing=1.2)
    picture = BytesIO()
    # Without date and random ids the same data give the same file; text stays text.
    with rc_context({"svg.hashsalt": "otb", "svg.fonttype": "none"}):
        figure.savefig(picture, format=file_format, metadata={"Date": None} if file_format == "svg" else None)
    return picture.getvalue()
