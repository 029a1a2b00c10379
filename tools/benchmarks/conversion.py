"""Import and export of a large Hugging Face model: rate against copying its files, and host memory, in one run.

    python -m tools.benchmarks.conversion --json conversion.json

A synthetic model of about a GiB is written to --directory, read into Megatron at TP 1 and TP 2, and exported again. Memory is what a
rank allocates on top of its own parameters, sampled from the kernel's count of its anonymous pages: pages of the files themselves,
which the kernel gives back when it needs them, do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from otb_megatron.config import validate
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import FullWeights, load_weights
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.learner import export_weights
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint

LIMIT_S = 900
SHAPE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=14, num_attention_heads=16, num_key_value_heads=8, head_dim=64, vocab_size=32768)


class PeakMemory:
    """The most anonymous memory of this process above where it began."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes() - self._before)

    def __enter__(self) -> PeakMemory:
        self.peak_bytes, self._before = 0, _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not count anonymous memory in /proc/self/status")


def write_model(directory: Path) -> None:
    """A Qwen3 model with random weights, in four files or so."""
    config = SHAPE | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False)
    config |= dict(attention_bias=False, max_position_embeddings=4096, dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    source = directory.with_name("source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    described = [(name, torch.float32, shape) for name, shape in _tensors()]

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, _, shape in described:
            yield name, torch.randn(shape) * 0.02

    Export(directory, described, source=source, dtype=torch.float32, max_file_bytes=300 * 2**20).write(values())


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, vocab, head = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"], SHAPE["head_dim"]
    query, key = SHAPE["num_attention_heads"] * head, SHAPE["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ((f"{prefix}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
        yield from ((f"{prefix}self_attn.{name}_norm.weight", (head,)) for name in "qk")
        yield from ((f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)) for name, rows in (("q", query), ("k", key), ("v", key)))
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        yield from ((f"{prefix}mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
        yield f"{prefix}mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def timed(call: Callable[[], Any]) -> tuple[float, int]:
    """(seconds, bytes above the memory at its start)"""
    with PeakMemory() as memory:
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
    return seconds, memory.peak_bytes


def convert_rank(rank: int, tp: int, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work = Path(folder)
    data = {"train": {"reasoning_gym": "chain_sum"}}
    config = validate({"model": {"path": str(work / "model"), "dtype": "float32"}, "data": data, "parallel": {"tensor_model_parallel_size": tp}}, "benchmark")
    hf = load_model(work / "model")
    parallel = start_parallel(config.parallel, seed=0, deadline_s=LIMIT_S)
    driver = Driver(parallel)
    model = build_model(config, hf, parallel)
    shard_bytes = sum(parameter.nbytes for chunk in model.chunks for parameter in chunk.parameters())
    for chunk in model.chunks:  # the kernel gives memory out at the first write; what the parameters take is no cost of the import
        for parameter in chunk.parameters():
            parameter.data.zero_()
    import_s, import_bytes = timed(lambda: (load_weights(model, Checkpoint(hf.path)), driver.share("the end of the import", None)))
    weights = FullWeights(model)
    export_s, export_bytes = timed(lambda: export_weights(weights, driver, hf.path, work / f"export_tp{tp}"))
    found = {"shard_mib": shard_bytes >> 20, "import_s": import_s, "import_extra_mib": import_bytes >> 20, "export_s": export_s}
    (work / f"tp{tp}_rank{rank}.json").write_text(json.dumps(found | {"export_extra_mib": export_bytes >> 20}))
    stop_parallel()


def convert(folder: Path, tp: int) -> list[dict[str, Any]]:
    """Measurements of each rank."""
    context = mp.start_processes(convert_rank, (tp, str(folder), 29600 + tp), nprocs=tp, join=False, start_method="spawn")
    deadline = time.monotonic() + LIMIT_S
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the conversion at TP {tp} took longer than {LIMIT_S} s")
    return [json.loads((folder / f"tp{tp}_rank{rank}.json").read_text()) for rank in range(tp)]


def copy_s(source: Path, target: Path) -> float:
    """Reads and writes every file once. The kernel alone can copy faster (it may not move the bytes at all), but no conversion could then follow."""
    started = time.perf_counter()
    shutil.copytree(source, target, copy_function=_copy)
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def _copy(source: str, target: str) -> None:
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        shutil.copyfileobj(reader, writer, 16 * 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory of 3 GiB (default: the system's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        work = Path(folder)
        write_model(work / "model")
        size = sum(file.stat().st_size for file in (work / "model").glob("*.safetensors"))
        report: dict[str, Any] = {"gib": round(size / 2**30, 2), "largest_tensor_mib": 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"] >> 20}
        for tp in (1, 2):
            before = copy_s(work / "model", work / "copy")
            ranks = convert(work, tp)
            copied = min(before, copy_s(work / "model", work / "copy"))
            same = all(_same(work / "model", work / f"export_tp{tp}", name) for name in Checkpoint(work / "model").names)
            shutil.rmtree(work / f"export_tp{tp}")
            slowest = {name: max(rank[f"{name}_s"] for rank in ranks) for name in ("import", "export")}
            report[f"TP{tp}"] = {"copy_s": copied, "ranks": ranks, "bit_for_bit": same} | {
                f"rate of the {name} / rate of a copy": round(copied / seconds, 2) for name, seconds in slowest.items()
            }
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def _same(model: Path, exported: Path, name: str) -> bool:
    return torch.equal(Checkpoint(model).get(name), Checkpoint(exported).get(name))


if __name__ == "__main__":
    main()
