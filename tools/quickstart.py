"""The quickstart: a small model learns to add, from random weights to a checked Hugging Face export, without a GPU.

    make quickstart                         (or: python -m tools.quickstart --seed 0)

makes a model and a task (`tools/quickstart_assets.py`), warm-starts the model on worked answers, trains it with the
Optimal Token Baseline, and checks the export: transformers must compute what the training checkpoint does, and vLLM must
answer what transformers answers. Everything lies below --output; `summary.json` there has the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from otb_megatron.config import Config, load
from otb_megatron.telemetry.console import summary_table
from otb_megatron.telemetry.jsonl import METRICS_FILE, read_steps
from otb_megatron.types import Prompt, UserError
from tools.quickstart_assets import make_assets

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SFT_CONFIG = CONFIGS / "qwen3_tiny_sums_sft_cpu.yaml"
OTB_CONFIG = CONFIGS / "qwen3_tiny_sums_otb_cpu.yaml"
NUM_RANKS = 2  # the tensor-parallel size of both configurations
SUMMARY_FILE = "summary.json"
MARKER = "made_by_quickstart"  # stands in a directory that a quickstart may replace


class PeakMemory:
    """Samples the resident memory of this process and all below it. Pages that processes share count once for each: an upper bound."""

    def __init__(self, interval_s: float = 1.0) -> None:
        self.peak_bytes = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self.peak_bytes = max(self.peak_bytes, _resident_bytes(psutil.Process()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _resident_bytes(root: psutil.Process) -> int:
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # it ended since the list was made
            continue
    return total


def prepare(output: Path) -> None:
    """Makes `output` empty. Raises UserError if something else than an earlier quickstart is in it."""
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise UserError(f"--output {output} holds files that are not an earlier quickstart's; name a new directory")
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).touch()


def run_command(title: str, arguments: Sequence[str]) -> float:
    """Runs `otb-megatron ARGUMENTS` with its output on this terminal. Returns the seconds it took; ends this program if it fails."""
    print(f"\n== {title}\n   otb-megatron {' '.join(arguments)}", flush=True)
    started = time.monotonic()
    # One thread for each rank: with more, two ranks on two cores would wait for each other's threads. Bars for tiny files are noise.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    status = subprocess.run([sys.executable, "-m", "otb_megatron.cli", *arguments], env=environment).returncode
    if status:
        raise SystemExit(status)
    return time.monotonic() - started


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


def greedy_answers(config: Config) -> tuple[list[Prompt], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The held-out prompts with the greedy answers of transformers and of vLLM, both loaded from `config.model.path`. Answers are token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from otb_megatron.data.sources import load_prompts
    from otb_megatron.rollout.pool import RolloutPool

    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    limit = config.rollout.max_response_tokens
    assert config.data.validation is not None
    prompts = load_prompts(config.data.validation, tokenizer, max_prompt_tokens=config.data.max_prompt_tokens, overlong="filter").prompts
    model = AutoModelForCausalLM.from_pretrained(config.model.path).eval()
    with_transformers = _answers(model, prompts, limit)
    with RolloutPool(
        config.rollout, model_dir=config.model.path, dtype=config.model.dtype, max_prompt_tokens=config.data.max_prompt_tokens, load_weights=True
    ) as pool:
        responses = pool.generate(prompts, n=1, temperature=0.0, max_response_tokens=limit, seed=None)
    return prompts, with_transformers, [response.token_ids for (response,) in responses]


def _answers(model: Any, prompts: Sequence[Prompt], limit: int) -> list[tuple[int, ...]]:
    """Prompts of one length at a time, so that nothing is padded."""
    import torch

    end = model.generation_config.eos_token_id
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.token_ids), []).append(index)
    answers: list[tuple[int, ...]] = [()] * len(prompts)
    for length, indices in by_length.items():
        ids = torch.tensor([prompts[index].token_ids for index in indices])
        generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)[:, length:].tolist()
        for index, row in zip(indices, generated, strict=True):
            answers[index] = tuple(row[: row.index(end) + 1] if end in row else row)  # what follows the end is filling
    return answers


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
        seconds["sft"] = run_command("Warm start: supervised fine-tuning", [*launch, "sft", str(SFT_CONFIG), *sft_overrides])
        otb_overrides = overrides(sft_dir / "export", assets.train, assets.validation, otb_dir, seed, otb_steps)
        seconds["otb"] = run_command("Reinforcement learning: OTB", [*launch, "train", str(OTB_CONFIG), *otb_overrides])
        checking = time.monotonic()
        run_command("Does transformers compute what the checkpoint does?", ["convert", "verify", str(otb_dir / "config.yaml")])
        print("\n== Does vLLM answer what transformers answers?", flush=True)
        config = load(OTB_CONFIG, [*otb_overrides, f"model.path={otb_dir / 'export'}"])
        prompts, with_transformers, with_vllm = greedy_answers(config)
        num_equal = sum(a == b for a, b in zip(with_transformers, with_vllm, strict=True))
        print(f"{num_equal} of {len(prompts)} greedy answers are the same, token by token")
        seconds["checks"] = time.monotonic() - checking
    summary = summarize(otb_dir) | {
        "seed": seed,
        "hf_export_matches_transformers": True,  # `convert verify` ends the quickstart if not
        "hf_export_matches_vllm": num_equal == len(prompts),
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
        prepare(options.output)
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
