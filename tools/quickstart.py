"""The quickstart: a small model learns to add, from random weights to a checked Hugging Face export, without a GPU.

    make quickstart                         (or: python -m tools.quickstart --seed 0)

makes a model and a task (`tools/quickstart_assets.py`), warm-starts the model on worked answers, trains it with the
Optimal Token Baseline, and checks the export: transformers must compute what the training checkpoint does, and vLLM must
answer what transformers answers. Everything lies below --output; `summary.json` there has the numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from otb_megatron.config import Config, load
from otb_megatron.telemetry.console import summary_table
from otb_megatron.telemetry.jsonl import METRICS_FILE, read_steps
from otb_megatron.types import UserError
from tools.quickstart_assets import make_assets
from tools.walk import PeakMemory, answers_of_transformers, answers_of_vllm, prepare, run_command

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SFT_CONFIG = CONFIGS / "qwen3_tiny_sums_sft_cpu.yaml"
OTB_CONFIG = CONFIGS / "qwen3_tiny_sums_otb_cpu.yaml"
NUM_RANKS = 2  # the tensor-parallel size of both configurations
SUMMARY_FILE = "summary.json"
MARKER = "made_by_quickstart"  # stands in a directory that a quickstart may replace


def overrides(model: Path, train: Path, validation: Path, output_dir: Path, seed: int, num_steps: int | None) -> list[str]:
    """What a quickstart sets on top of its configuration files."""
    chosen = [
        f"model.path={model}",
        f"data.train.path={train}",
        f"data.validation.path={validation}",
        f"trainer.output_dir={output_dir}",
        *(f"{section}.seed={seed}" for section in ("data", "rollout", "trainer")),
    ]
    return chosen + ([f"trainer.num_steps={num_steps}"] if num_steps else [])


def count_equal_answers(config: Config) -> tuple[int, int]:
    """Held-out prompts that transformers and vLLM, both with the weights at `config.model.path`, answer with the same tokens, and all of them."""
    from transformers import AutoTokenizer

    from otb_megatron.data.sources import load_prompts

    assert config.data.validation is not None
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = load_prompts(config.data.validation, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens, overlong="filter").prompts
    with_transformers = answers_of_transformers(config.model.path, prompts, config.rollout.max_response_tokens)
    return sum(a == b for a, b in zip(with_transformers, answers_of_vllm(config, prompts), strict=True)), len(prompts)


def summarize(otb_dir: Path) -> dict[str, Any]:
    """What the training run measured: held-out accuracy before and after, its steps, and how often it sent its weights."""
    rows = read_steps(otb_dir / METRICS_FILE)
    measured = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    return {
        "accuracy_warm_start": measured[0],
        "accuracy_final": measured[-1],
        "steps": rows[-1]["step"],
        "weight_updates": int(rows[-1]["weights/version"]),
    }


def quickstart(output: Path, seed: int, sft_steps: int | None, otb_steps: int | None) -> dict[str, Any]:
    """Runs everything and returns the summary, which is also written to `output`."""
    started = time.monotonic()
    sft_dir, otb_dir = output / "sft", output / "otb"
    with PeakMemory() as memory:
        print(f"== Making a Qwen3 model, its tokenizer and sums to train on in {output / 'assets'}", flush=True)
        assets = make_assets(output / "assets", seed)
        seconds = {"assets": time.monotonic() - started}
        launch = ["launch", "--nproc-per-node", str(NUM_RANKS)]
        sft_overrides = overrides(assets.model, assets.demonstrations, assets.validation, sft_dir, seed, sft_steps)
        seconds["sft"] = run_command("Warm start: supervised fine-tuning", [*launch, "sft", str(SFT_CONFIG), *sft_overrides]).seconds
        otb_overrides = overrides(sft_dir / "export", assets.train, assets.validation, otb_dir, seed, otb_steps)
        seconds["otb"] = run_command("Reinforcement learning: OTB", [*launch, "train", str(OTB_CONFIG), *otb_overrides]).seconds
        checking = time.monotonic()
        run_command("Does transformers compute what the checkpoint does?", ["convert", "verify", str(otb_dir / "config.yaml")])
        print("\n== Does vLLM answer what transformers answers?", flush=True)
        config = load(OTB_CONFIG, [*otb_overrides, f"model.path={otb_dir / 'export'}"])
        num_equal, num_prompts = count_equal_answers(config)
        print(f"{num_equal} of {num_prompts} greedy answers are the same, token by token")
        seconds["checks"] = time.monotonic() - checking
    summary = summarize(otb_dir) | {
        "seed": seed,
        "hf_export_matches_transformers": True,  # `convert verify` ends the quickstart if not
        "hf_export_matches_vllm": num_equal == num_prompts,
        "seconds": round(time.monotonic() - started, 1),
        "seconds_by_part": {name: round(value, 1) for name, value in seconds.items()},
        "peak_memory_gib": round(memory.peak_bytes / 2**30, 2),
        "checkpoint": str((otb_dir / "checkpoints" / "latest").resolve()),
        "export": str(otb_dir / "export"),
        "tensorboard": str(otb_dir / "tensorboard"),
        "report": str(otb_dir / "report.html"),
    }
    (output / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def show(summary: dict[str, Any], output: Path) -> None:
    """The short table at the end."""
    print("\n== Done", flush=True)
    summary_table(
        [
            ("held-out accuracy, warm start", summary["accuracy_warm_start"]),
            ("held-out accuracy, final", summary["accuracy_final"]),
            ("steps", str(summary["steps"])),
            ("seconds", f"{summary['seconds']:.0f}"),
            ("peak memory", f"{summary['peak_memory_gib']:.1f} GiB"),
            *((name, summary[name]) for name in ("checkpoint", "export", "tensorboard", "report")),
            ("summary", output / SUMMARY_FILE),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the problems, the weights and the sampling (default: 0)")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="directory to write to (default: runs/quickstart)")
    parser.add_argument("--sft-steps", type=int, help="steps of the warm start (default: the configuration's)")
    parser.add_argument("--steps", type=int, help="steps of reinforcement learning (default: the configuration's)")
    options = parser.parse_args()
    try:
        prepare(options.output, MARKER)
        summary = quickstart(options.output, options.seed, options.sft_steps, options.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summary, options.output)
    if not summary["hf_export_matches_vllm"]:
        print("error: vLLM and transformers answer differently from the same export", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
