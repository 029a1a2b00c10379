"""What OTB costs in a training step, against GRPO, in one run: the same samples through both, alternately, by phase.

    python -m tools.benchmarks.step CONFIG --rollouts RUN_DIR/rollouts [--json FILE] [section.key=value ...]
    torchrun --nproc-per-node 2 -m tools.benchmarks.step CONFIG --rollouts ...

CONFIG is a training configuration and the rollouts are those that a run with `rollout.save=true` recorded. Sampling is not
part of it: both estimators train on the recorded samples. The statistics pass gives log-prob, entropy and energy together
and is the same for both; the estimator's own part is the phase "advantages".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from otb_megatron.config import Config, load
from otb_megatron.telemetry.metrics import Metrics
from otb_megatron.trainer.loop import collect, estimate
from otb_megatron.trainer.run import Run
from otb_megatron.trainer.validate import validate

ESTIMATORS = ("grpo", "optimal_token_baseline")


def measure(run: Run, configs: dict[str, Config], num_steps: int) -> dict[str, dict[str, float]]:
    """Median seconds of each phase by estimator. The first step of each warms up and does not count."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in configs}
    for step in range(1, num_steps + 1):
        for name in ESTIMATORS if step % 2 else reversed(ESTIMATORS):
            run.config = configs[name]
            run.timer.reset()
            started = time.perf_counter()
            batch = collect(run, step, Metrics())
            inputs = estimate(run, batch, Metrics())
            with run.timer.phase("update"):
                run.learner.update(batch, inputs)
            if step > 1:
                for phase, value in (run.timer.seconds() | {"step": time.perf_counter() - started}).items():
                    seconds[name].setdefault(phase, []).append(value)
    return {name: {phase: statistics.median(values) for phase, values in phases.items()} for name, phases in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rollouts", type=Path, required=True, help="the rollouts directory of a run with rollout.save=true")
    parser.add_argument("--output", type=Path, default=Path("runs/step_benchmark"), help="scratch directory (default: runs/step_benchmark)")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    num_steps = len(list(options.rollouts.glob("*.jsonl")))
    scratch = [f"rollout.replay_dir={options.rollouts}", f"trainer.output_dir={options.output}", "trainer.resume=never", f"trainer.num_steps={num_steps}"]
    overrides = [*options.overrides, *scratch, "rollout.save=false", "telemetry.progress=false", "telemetry.tensorboard=false"]
    configs = {name: load(options.config, [*overrides, f"algorithm.advantage={name}"]) for name in ESTIMATORS}
    model = validate(configs[ESTIMATORS[0]], "train", int(os.environ.get("WORLD_SIZE", "1")))
    with Run(configs[ESTIMATORS[0]], "train", model) as run:
        result = measure(run, configs, num_steps)
        is_driver = run.driver.is_driver
    if not is_driver:
        return
    grpo, otb = (result[name] for name in ESTIMATORS)
    print(f"{'phase':<12}{'grpo':>12}{'OTB':>12}   median of {num_steps - 1} steps, seconds")
    for phase in grpo:
        print(f"{phase:<12}{grpo[phase]:>12.4f}{otb[phase]:>12.4f}")
    added = (otb["advantages"] - grpo["advantages"]) / grpo["step"]
    print(f"OTB's estimator adds {100 * added:.2f} % to a step; the whole step takes {otb['step'] / grpo['step']:.3f} times GRPO's")
    if options.json:
        options.json.write_text(json.dumps({"seconds": result, "estimator_share_added": added, "step_ratio": otb["step"] / grpo["step"]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
