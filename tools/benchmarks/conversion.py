"""Import and export of a large Hugging Face model: rate against copying its files, and host memory, in one run.

    python -m tools.benchmarks.conversion --json conversion.json

A synthetic model of about a GiB is written to --directory; `convert import` and `convert export` then run as their commands do, at TP 1
and TP 2, in rounds that copy the model's files before each, since the speed of a disk changes. The first round warms up; rates are
medians of the others. An import and a copy of the other kind are on the disk when they end (fsync), an export and a plain copy may still
be in the kernel's memory, so both copies are timed.

Memory is the most that a rank allocates, its shard included, above what it had before the command, in any round. It is sampled from the
kernel's count of anonymous pages: pages of the files themselves, which the kernel gives back when it needs them, do not count. The limit is
the rank's shard and two buckets; the bucket of a conversion is a Hugging Face tensor, and the largest one counts.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from otb_megatron.config import Config, validate
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.shards import num_local_bytes
from otb_megatron.trainer.conversion import export, import_model
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import Checkpoint

LIMIT_S = 1800
NUM_ROUNDS = 5
GIB_SHAPE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=14, num_attention_heads=16, num_key_value_heads=8, head_dim=64, vocab_size=32768)

Shape = dict[str, int]  # fields of config.json


class PeakMemory:
    """The most anonymous memory of this process above where it began."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes() - self._before)

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier round freed must not serve this one unseen
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


def write_model(directory: Path, shape: Shape) -> None:
    """A Qwen3 model with random float32 weights, in files of at most 300 MiB."""
    config = shape | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_act="silu", rms_norm_eps=1e-6, tie_word_embeddings=False)
    config |= dict(attention_bias=False, max_position_embeddings=4096, dtype="float32", rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    source = directory.with_name("source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    described = [(name, torch.float32, dimensions) for name, dimensions in _tensors(shape)]

    def values() -> Iterator[tuple[str, Tensor]]:
        for name, _, dimensions in described:
            yield name, torch.randn(dimensions) * 0.02

    Export(directory, described, source=source, dtype=torch.float32, max_file_bytes=300 * 2**20).write(values())


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, vocab, head = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"], shape["head_dim"]
    query, key = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from ((f"{prefix}{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))
        yield from ((f"{prefix}self_attn.{name}_norm.weight", (head,)) for name in "qk")
        yield from ((f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)) for name, rows in (("q", query), ("k", key), ("v", key)))
        yield f"{prefix}self_attn.o_proj.weight", (hidden, query)
        yield from ((f"{prefix}mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
        yield f"{prefix}mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def largest_tensor_bytes(shape: Shape) -> int:
    """The bucket of a conversion of `write_model`'s model."""
    return 4 * max(rows * columns for rows, columns in (dimensions for _, dimensions in _tensors(shape) if len(dimensions) == 2))


def convert_rank(rank: int, tp: int, work: Path, num_rounds: int) -> dict[str, Any]:
    """Imports and exports `work`/model in a process with torchrun's environment, `num_rounds` times after one of warming up.

    The first rank copies, and removes what a round has written; the others wait for it before the next command. What the last round
    exported remains in `work`/export.

    Returns:
        `shard_bytes`; `import_bytes` and `export_bytes`, the peaks above the memory before; on the first rank the seconds of every round but
        the first.
    """
    values = {
        "model": {"path": str(work / "model"), "dtype": "float32"},
        "data": {"train": {"reasoning_gym": "chain_sum"}},
        "parallel": {"tensor_model_parallel_size": tp},
        "trainer": {"output_dir": str(work / "run"), "deadline_s": LIMIT_S},
    }
    config = validate(values, "benchmark")
    _join("shard", rank, tp)
    found: dict[str, Any] = {"shard_bytes": _shard_bytes(config)}
    is_first = rank == 0

    def note(name: str, call: Callable[[], Any], number: int) -> None:
        _join(f"{name} {number}", rank, tp)
        with PeakMemory() as memory:
            started = time.perf_counter()
            call()
            seconds = time.perf_counter() - started
        found[f"{name}_bytes"] = max(found.get(f"{name}_bytes", 0), memory.peak_bytes)
        if is_first and number > 0:
            found.setdefault(f"{name}_s", []).append(seconds)

    def copy(name: str, number: int) -> None:
        if is_first:
            os.sync()  # what is still to be written of the work before is no part of what comes
            seconds = copy_s(work / "model", work / "copy", synced=name == "synced_copy")
            if number > 0:
                found.setdefault(f"{name}_s", []).append(seconds)
            os.sync()

    for number in range(1 + num_rounds):
        if is_first:
            for left in (work / "run", work / "export"):
                shutil.rmtree(left, ignore_errors=True)
        copy("synced_copy", number)
        note("import", lambda: import_model(config), number)
        copy("copy", number)
        note("export", lambda: export(config, None, work / "export"), number)
    return found


def _join(name: str, rank: int, world_size: int) -> None:
    """Makes the process group of the next command, which leaves it. torchrun's store still holds the addresses of the one before."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world_size, timeout=timedelta(seconds=LIMIT_S))


def _shard_bytes(config: Config) -> int:
    """Size of this rank's part of the model, which is built for that and not filled."""
    parallel = start_parallel(config.parallel, seed=0, deadline_s=LIMIT_S)
    try:
        return num_local_bytes(build_model(config, load_model(config.model.path), parallel))
    finally:
        stop_parallel()


def copy_s(source: Path, target: Path, *, synced: bool) -> float:
    """Seconds to read and write every file once.

    The kernel alone can copy faster (it may not move the bytes at all), but no conversion could then follow.
    """
    started = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as reader, open(target / path.name, "wb", buffering=0) as writer:
            shutil.copyfileobj(reader, writer, 16 * 2**20)
            if synced:
                os.fsync(writer.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def measure(work: Path, tp: int, num_rounds: int) -> dict[str, Any]:
    """What `convert_rank` finds on `tp` ranks, in MiB and ratios."""
    ranks = _ranks(work, tp, num_rounds)
    same = all(_same(work, name) for name in Checkpoint(work / "model").names)
    rounds = {name: values for name, values in ranks[0].items() if name.endswith("_s")}
    ratios = {
        f"rate of the {command} / rate of a {copy.replace('_', ' ')}": statistics.median(
            copied / seconds for copied, seconds in zip(rounds[f"{copy}_s"], rounds[f"{command}_s"], strict=True)
        )
        for command in ("import", "export")
        for copy in ("synced_copy", "copy")
    }
    memory = [{name.replace("_bytes", "_mib"): value >> 20 for name, value in rank.items() if name.endswith("_bytes")} for rank in ranks]
    return {"memory_of_ranks": memory, "rounds": rounds, "bit_for_bit": same} | ratios


def _ranks(work: Path, tp: int, num_rounds: int) -> list[dict[str, Any]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, as under torchrun: it outlives every process group
    context = mp.start_processes(_start_rank, (tp, str(work), num_rounds, store.port), nprocs=tp, join=False, start_method="spawn")
    deadline = time.monotonic() + LIMIT_S
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the conversion at TP {tp} took longer than {LIMIT_S} s")
    return [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(tp)]


def _start_rank(rank: int, tp: int, folder: str, num_rounds: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(tp), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work = Path(folder)
    (work / f"rank{rank}.json").write_text(json.dumps(convert_rank(rank, tp, work, num_rounds)))


def _same(work: Path, name: str) -> bool:
    return torch.equal(Checkpoint(work / "model").get(name), Checkpoint(work / "export").get(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--directory", type=Path, help="where to make a temporary directory of 4 GiB (default: the system's)")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="that count, after one that warms up (default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        work = Path(folder)
        write_model(work / "model", GIB_SHAPE)
        size = sum(file.stat().st_size for file in (work / "model").glob("*.safetensors"))
        bucket_mib = largest_tensor_bytes(GIB_SHAPE) >> 20
        report: dict[str, Any] = {"gib": round(size / 2**30, 2), "bucket_mib": bucket_mib}
        for tp in (1, 2):
            report[f"TP{tp}"] = measure(work, tp, args.rounds)
    print(json.dumps(report, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    for tp in (1, 2):
        print(f"TP{tp}:", *(f"{name}: {value:.2f}" for name, value in report[f"TP{tp}"].items() if name.startswith("rate")), sep="\n  ")
        for rank, memory in enumerate(report[f"TP{tp}"]["memory_of_ranks"]):
            limit_mib = memory["shard_mib"] + 2 * bucket_mib
            print(f"  rank {rank}: import {memory['import_mib']} MiB, export {memory['export_mib']} MiB; shard + 2 buckets {limit_mib} MiB")


if __name__ == "__main__":
    main()
