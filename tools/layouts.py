"""Trains in every layout of tests/distributed/layouts.py and writes how far each is from one process into docs/parallelism.md.

make test-layouts
python -m tools.layouts ["DP2 x TP2" ...]      only these layouts; the page stays as it is
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.launcher import RanksFailed
from tests.distributed.layouts import CASES, LAYOUTS, MODELS, TOLERANCE, Difference, Reference, measure

PAGE = Path(__file__).parents[1] / "docs" / "parallelism.md"
BEGIN, END = "<!-- begin of what `make test-layouts` writes -->", "<!-- end of what `make test-layouts` writes -->"
COLUMNS = ("gradient", "metrics", "weights")

Measured = dict[tuple[str, str], Difference]  # by layout and model


def table(measured: Measured) -> str:
    """The layouts and their differences as Markdown; a layout that was not measured for a model has dashes."""
    lines = [
        "| layout | processes | " + " | ".join(f"{model}: {column}" for model in MODELS for column in COLUMNS) + " |",
        "|---|---|" + "---|" * (len(MODELS) * len(COLUMNS)),
    ]
    for layout in LAYOUTS:
        cells = []
        for model in MODELS:
            found = measured.get((layout.name, model))
            cells += ["-"] * len(COLUMNS) if found is None else [f"{getattr(found, column):.1e}" for column in COLUMNS]
        lines.append(f"| {layout.name} | {layout.world_size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_table(page: str) -> dict[str, dict[str, list[float]]]:
    """layout -> model -> numbers of COLUMNS, from the page."""
    rows = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        name, _, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        by_model = {model: cells[i * len(COLUMNS) : (i + 1) * len(COLUMNS)] for i, model in enumerate(MODELS)}
        found[name] = {model: [float(number) for number in numbers] for model, numbers in by_model.items() if "-" not in numbers}
    return found


def write(measured: Measured) -> None:
    """Puts the table between the page's marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(measured)}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help="names of layouts (default: all)")
    wanted = parser.parse_args().layouts
    if unknown := set(wanted) - {layout.name for layout in LAYOUTS}:
        parser.error(f"no such layout: {', '.join(sorted(unknown))}")
    measured: Measured = {}
    failures = []
    with tempfile.TemporaryDirectory(prefix="layouts-") as scratch:
        references = {model: Reference.of(model, Path(scratch, model)) for model in MODELS}
        for number, (layout, model) in enumerate((layout, model) for layout, model in CASES if not wanted or layout.name in wanted):
            started = time.perf_counter()
            try:
                found = measured[layout.name, model] = measure(layout, references[model], Path(scratch, f"run{number}"))
            except RanksFailed as error:
                print(error, file=sys.stderr)
                failures.append(f"{layout.name}, {model}: did not run")
                continue
            if not found.largest < TOLERANCE:
                failures.append(f"{layout.name}, {model}: {found}")
            numbers = "  ".join(f"{column} {getattr(found, column):.1e}" for column in COLUMNS)
            print(f"{layout.name:<45}{model:<7}{numbers}  {time.perf_counter() - started:5.1f} s", flush=True)
    if failures:
        sys.exit(f"not within {TOLERANCE:g} of one process:\n  " + "\n  ".join(failures))
    if not wanted:
        write(measured)
        print(f"{len(CASES)} cases within {TOLERANCE:g} of one process; their table is in {PAGE.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
