"""Advantage estimators against each other on the quickstart's task, over seeds and group sizes.

    python -m tools.experiments.estimators --output runs/estimators
    python -m tools.experiments.estimators --output runs/estimators --clip-grad 0 --group-sizes 4 32

Every cell (seed, estimator, N) starts from its seed's warm start and trains on the same number of responses a step: N responses to
each of responses/N prompts. One process holds the trainer, one engine serves the whole grid. Each finished cell is a line of
`results.jsonl`; started again, the command continues with the first cell that has none. `--report` writes the page and its pictures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from otb_megatron.config import Config, load
from otb_megatron.types import UserError
from tools.experiments.estimators_report import write_report
from tools.quickstart import NUM_RANKS, OTB_CONFIG, SFT_CONFIG, overrides, run_command
from tools.quickstart_assets import Assets, make_assets

ESTIMATORS = {
    "otb": "optimal_token_baseline",
    "otb_loo": "optimal_token_baseline_loo",
    "ogb": "optimal_global_baseline",
    "opo": "opo",
    "rloo": "rloo",
    "grpo": "grpo",
}
GROUP_SIZES = (4, 8, 32)
RESPONSES_PER_STEP = 128
NUM_STEPS = 120
EVAL_INTERVAL = 5
CLIP_GRAD = 1.0  # the configuration's
RESULTS_FILE = "results.jsonl"


@dataclass(frozen=True)
class Cell:
    """One training run of the grid."""

    seed: int
    estimator: str  # a key of ESTIMATORS
    n: int  # responses a prompt
    clip_grad: float = CLIP_GRAD


def grid(seeds: int, group_sizes: Sequence[int] = GROUP_SIZES, clip_grad: float = CLIP_GRAD) -> list[Cell]:
    """Seed by seed, so that a grid that is stopped early has whole seeds."""
    return [Cell(seed, estimator, n, clip_grad) for seed in range(seeds) for n in group_sizes for estimator in ESTIMATORS]


def finished(results: Path) -> dict[Cell, dict[str, Any]]:
    """The lines of earlier starts; one that was being written when its process ended is left out."""
    lines = results.read_text().splitlines(keepends=True) if results.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {Cell(**row["cell"]): row for row in rows}


def warm_start(output: Path, seed: int) -> tuple[Assets, Path]:
    """The seed's task and its supervised start, made once."""
    directory = output / f"seed_{seed}"
    assets = make_assets(directory / "assets", seed)
    export = directory / "sft" / "export"
    if not export.is_dir():
        chosen = overrides(assets.model, assets.demonstrations, assets.validation, directory / "sft", seed, None)
        run_command(f"Warm start of seed {seed}", ["launch", "--nproc-per-node", str(NUM_RANKS), "sft", str(SFT_CONFIG), *chosen])
    return assets, export


def cell_config(cell: Cell, assets: Assets, model: Path, output_dir: Path, num_steps: int) -> Config:
    chosen = overrides(model, assets.train, assets.validation, output_dir, cell.seed, num_steps)
    return load(
        OTB_CONFIG,
        [
            *chosen,
            "parallel.tensor_model_parallel_size=1",
            f"algorithm.advantage={ESTIMATORS[cell.estimator]}",
            f"optimizer.clip_grad={cell.clip_grad:g}",
            f"rollout.n={cell.n}",
            f"data.prompts_per_step={RESPONSES_PER_STEP // cell.n}",
            f"trainer.eval_interval={EVAL_INTERVAL}",
            "trainer.resume=never",
            "telemetry.progress=false",
            "telemetry.tensorboard=false",
        ],
    )


def run_grid(output: Path, cells: list[Cell], num_steps: int) -> None:
    """Trains every cell that has no result yet."""
    from otb_megatron.trainer.source import Engines

    results = output / RESULTS_FILE
    done = finished(results).keys() & set(cells)
    left = [cell for cell in cells if cell not in done]
    starts = {seed: warm_start(output, seed) for seed in sorted({cell.seed for cell in left})}
    if not left:
        return
    # The tokenizer and the architecture are the same for every seed, and each cell sends its own weights: one engine serves all.
    cell = left[0]
    engines = Engines(cell_config(cell, *starts[cell.seed], output / "engine", num_steps), load_weights=False)
    started = time.monotonic()
    try:
        for number, cell in enumerate(left, start=1):
            row = run_cell(cell, cell_config(cell, *starts[cell.seed], output / "cell", num_steps), engines)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            remaining_s = (time.monotonic() - started) / number * (len(left) - number)
            print(
                f"{len(done) + number}/{len(cells)}  seed {cell.seed}  {cell.estimator:8s} N={cell.n:<3d} accuracy {row['accuracy'][0]:.3f} -> "
                f"{row['accuracy'][-1]:.3f}  {row['seconds']:.0f} s, about {remaining_s / 60:.0f} min left",
                flush=True,
            )
    finally:
        engines.close()


def run_cell(cell: Cell, config: Config, engines: Any) -> dict[str, Any]:
    """Trains one cell and returns its line of the results."""
    from otb_megatron.telemetry.jsonl import METRICS_FILE, read_steps
    from otb_megatron.trainer.loop import train
    from otb_megatron.trainer.run import Run
    from otb_megatron.trainer.validate import validate

    shutil.rmtree(config.trainer.output_dir, ignore_errors=True)
    started = time.monotonic()
    with Run(config, "train", validate(config, "train", 1), engines=engines) as run:
        stopped = train(run)
    if stopped is not None:
        raise UserError(f"ended by {stopped.signal} in {cell}; start again to continue with it")
    rows = read_steps(config.trainer.output_dir / METRICS_FILE)
    measured = [row for row in rows if "eval/accuracy" in row]
    steps = rows[1:]
    return {
        "cell": asdict(cell),
        "eval_step": [row["step"] for row in measured],
        "accuracy": [row["eval/accuracy"] for row in measured],
        "tokens": [row["rollout/tokens"] for row in steps],
        "reward": [row["rewards/mean"] for row in steps],
        "gradient_norm": [row["optimizer/grad_norm"] for row in steps],
        "variance_proxy": [row["variance/token"] for row in steps],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.experiments.estimators", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/estimators"), help="directory of the runs and results (default: runs/estimators)")
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to SEEDS-1 (default: 5)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help=f"of every cell (default: {NUM_STEPS})")
    parser.add_argument("--group-sizes", type=int, nargs="+", choices=GROUP_SIZES, default=GROUP_SIZES, metavar="N", help="of 4, 8 and 32 (default: all)")
    parser.add_argument("--clip-grad", type=float, default=CLIP_GRAD, help=f"bound of the global gradient norm, 0 for none (default: {CLIP_GRAD:g})")
    parser.add_argument("--report", type=Path, metavar="FILE.md", help="only write this page from the results so far, its pictures beside it")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if options.report is None:
            options.output.mkdir(parents=True, exist_ok=True)
            run_grid(options.output, grid(options.seeds, options.group_sizes, options.clip_grad), options.steps)
        else:
            write_report(list(finished(options.output / RESULTS_FILE).values()), options.report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
