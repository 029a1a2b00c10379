"""Typed metrics that merge over microbatches and ranks, and give the same values however the work was split."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["mean", "sum", "maximum", "minimum"]


@dataclass(slots=True)
class _Entry:
    kind: Kind
    value: float  # numerator of a mean, else the value itself
    count: float = 0.0  # denominator of a mean, else unused

    def absorb(self, other: _Entry) -> None:
        if self.kind in ("mean", "sum"):
            self.value += other.value
            self.count += other.count
        elif math.isnan(self.value) or math.isnan(other.value):
            self.value = math.nan  # max() and min() would keep or drop NaN depending on the order of their arguments
        elif self.kind == "maximum":
            self.value = max(self.value, other.value)
        else:
            self.value = min(self.value, other.value)


@dataclass(slots=True)
class Metrics:
    """A bag of named metrics, each of one kind that says how two of them become one.

    A mean is kept as numerator and denominator until `values()`, so that a microbatch of 3 tokens weighs 3 tokens and
    not as much as one of 3000 (no mean of means). Every mean has its own denominator. Record per-token means as the sum
    over tokens and the number of tokens of this rank. Ranks that hold the same tokens (tensor and context parallel
    peers, pipeline stages) must not all record them: merging cannot know.

    It holds Python floats only, so it pickles small and carries no device memory between processes.
    """

    _entries: dict[str, _Entry] = field(default_factory=dict)

    def mean(self, name: str, total: float, count: float) -> None:
        """Adds `total`, a sum over `count` items, to the mean `name`. A count of 0 is allowed and weighs nothing.

        Raises:
            ValueError: the count is negative or not finite, a total other than 0 comes with a count of 0, or `name` is of another kind.
        """
        total, count = float(total), float(count)
        if not (count >= 0 and math.isfinite(count)) or (count == 0 and total != 0):
            raise ValueError(f"metric {name!r}: a mean of total {total} over count {count}")
        self._record(name, _Entry("mean", total, count))

    def sum(self, name: str, value: float) -> None:
        """Adds `value` to the sum `name`."""
        self._record(name, _Entry("sum", float(value)))

    def maximum(self, name: str, value: float) -> None:
        """Raises the maximum `name` to `value`; NaN stays NaN."""
        self._record(name, _Entry("maximum", float(value)))

    def minimum(self, name: str, value: float) -> None:
        """Lowers the minimum `name` to `value`; NaN stays NaN."""
        self._record(name, _Entry("minimum", float(value)))

    def merge(self, other: Metrics) -> None:
        """Takes in what another microbatch or rank recorded; `other` stays as it is.

        Raises:
            ValueError: a name is of another kind there. All such names are listed and nothing was merged.
        """
        clashes = [
            f"{name!r} is a {entry.kind} here and a {other._entries[name].kind} there"
            for name, entry in self._entries.items()
            if name in other._entries and other._entries[name].kind != entry.kind
        ]
        if clashes:
            raise ValueError("metrics cannot be merged: " + "; ".join(clashes))
        for name, entry in other._entries.items():
            self._record(name, _Entry(entry.kind, entry.value, entry.count))

    def values(self) -> dict[str, float]:
        """The metrics by name, sorted. Means over nothing are left out."""
        return {
            name: entry.value / entry.count if entry.kind == "mean" else entry.value
            for name, entry in sorted(self._entries.items())
            if entry.kind != "mean" or entry.count > 0
        }

    def _record(self, name: str, entry: _Entry) -> None:
        known = self._entries.setdefault(name, entry)
        if known is entry:
            return
        if known.kind != entry.kind:
            raise ValueError(f"metric {name!r} is a {known.kind}; it cannot also be a {entry.kind}")
        known.absorb(entry)
