"""How well one positive quantity tracks another: rank correlation, and the spread of their ratio."""

from __future__ import annotations

import numpy as np

RATIO_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def rank_correlation(x: np.ndarray, y: np.ndarray, cell: np.ndarray | None = None) -> float:
    """Spearman's rank correlation; ties get their mean rank. With `cell`, ranks count within each cell, less the cell's mean rank:
    only the order among members of one cell matters, and cells weigh by their size.

    Example: x = 1, 2, 3 and y = 1, 3, 2: ranks less their mean (-1, 0, 1) and (-1, 1, 0), correlation 1 / 2.

    Args:
        x, y: [values].
        cell: integers [values].

    Returns:
        NaN where x or y does not vary within any cell.
    """
    cell = np.zeros(len(x), dtype=np.int64) if cell is None else cell
    left, right = (_centred_ranks(values, cell) for values in (x, y))
    norm = np.sqrt(np.sum(left**2) * np.sum(right**2))
    return float(np.sum(left * right) / norm) if norm > 0 else float("nan")


def ratio_quantiles(true: np.ndarray, proxy: np.ndarray) -> list[float]:
    """Quantiles RATIO_QUANTILES of (true / proxy) divided by the median: 1 in the middle, and all 1 for a proxy that is right up to a factor.

    Values where either is 0 have no ratio and are left out.
    """
    used = (true > 0) & (proxy > 0)
    if not used.any():
        return [float("nan")] * len(RATIO_QUANTILES)
    ratio = true[used] / proxy[used]
    return [float(value) for value in np.quantile(ratio, RATIO_QUANTILES) / np.median(ratio)]


def _centred_ranks(values: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Mean ranks within the cell, less the mean rank of the cell."""
    order = np.lexsort((values, cell))
    sorted_values, sorted_cells = values[order], cell[order]
    new_cell = np.concatenate(([True], sorted_cells[1:] != sorted_cells[:-1]))
    new_run = new_cell | np.concatenate(([True], sorted_values[1:] != sorted_values[:-1]))
    ranks = _middle(new_run) - _middle(new_cell)
    centred = np.empty(len(values))
    centred[order] = ranks
    return centred


def _middle(starts: np.ndarray) -> np.ndarray:
    """For each place the mean place of its run, runs beginning where `starts` is set."""
    first = np.flatnonzero(starts)
    size = np.diff([*first, len(starts)])
    return np.repeat(first + (size - 1) / 2, size)
