"""The policy statistics head against the textbook pipeline: time, peak memory and communication, in one run.

    python tools/benchmarks/statistics.py --json statistics.json

Textbook: entropy, sum of squares and log-prob as three passes over vocab-parallel logits, each with its own maximum, exponentials and
all-reduces, under torch autograd. Both run with one thread per rank, at tensor-parallel size 1 and 2 (gloo processes on a CPU). Where
a CUDA device is present, TP 1 runs there too, with rates against a copy of the same bytes and against the matmul alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script, this file's folder comes first on the path, and the file has the name of a module of the standard library
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor  # noqa: E402

from otb_megatron.ops.statistics import policy_statistics, policy_statistics_from_logits  # noqa: E402
from tools.benchmarks.live_bytes import LiveBytes  # noqa: E402

LIMIT_S = 900


class _SumOverGroup(torch.autograd.Function):
    """All-reduce in the forward pass, identity in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        if group is not None:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _shifted(logits: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Logits minus their row maximum over the group, and that maximum."""
    highest = logits.detach().amax(-1, keepdim=True)
    if group is not None:
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return logits - highest, highest


def textbook_entropy(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    shifted, highest = _shifted(logits, group)
    exp = shifted.exp()
    total = _SumOverGroup.apply(exp.sum(-1, keepdim=True), group)
    mean_logit = _SumOverGroup.apply((exp / total * logits).sum(-1, keepdim=True), group)
    return (highest + total.log() - mean_logit).squeeze(-1)


def textbook_sum_of_squares(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    shifted, _ = _shifted(logits, group)
    exp = shifted.exp()
    total = _SumOverGroup.apply(exp.sum(-1, keepdim=True), group)
    return _SumOverGroup.apply((exp / total).square().sum(-1), group)


def textbook_log_prob(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    shifted, _ = _shifted(logits, group)
    total = _SumOverGroup.apply(shifted.exp().sum(-1), group)
    local = targets - (dist.get_rank(group) if group is not None else 0) * logits.shape[1]
    inside = (local >= 0) & (local < logits.shape[1])
    column = local.clamp(0, logits.shape[1] - 1).unsqueeze(-1)
    chosen = _SumOverGroup.apply(shifted.gather(-1, column).squeeze(-1) * inside, group)
    return chosen - total.log()


def textbook(logits: Tensor, targets: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    return textbook_log_prob(logits, targets, group), textbook_entropy(logits, group), textbook_sum_of_squares(logits, group)


def seconds(call: Callable[[], Any], repeats: int, group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Wall-clock times, in rising order, of a call that all ranks make at once; the first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        if group is not None:
            dist.barrier(group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])


def measured(call: Callable[[], Any], repeats: int, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    times = seconds(call, repeats, group, device)
    with LiveBytes() as live:
        call()
    return {
        "best_ms": round(1e3 * times[0], 3),
        "median_ms": round(1e3 * times[len(times) // 2], 3),
        "peak_extra_mib": round(live.peak_bytes / 2**20, 2),
        "collectives": len(live.collectives),
        "collective_bytes": sum(size for _, size in live.collectives),
    }


def benchmark_rank(args: argparse.Namespace, tp: int, group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Any]:
    """All measurements of one rank. Every variant computes the three statistics; the gradient is that of log_prob - 0.01 entropy."""
    generator = torch.Generator().manual_seed(0)
    shard, rank = args.vocab // tp, dist.get_rank(group) if group is not None else 0
    hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(device)
    weight = (torch.randn(args.vocab, args.hidden, generator=generator) * 3 / args.hidden**0.5)[rank * shard : (rank + 1) * shard].clone().to(device)
    targets = torch.randint(0, args.vocab, (args.tokens,), generator=generator).to(device)
    if device.type == "cuda":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = hidden @ weight.t()
    options = {"vocab_size": args.vocab, "group": group}

    def head(x: Tensor, grad: bool = False) -> tuple[Tensor, Tensor]:
        statistics = policy_statistics_from_logits(x, targets, entropy_grad=grad, **options)
        return statistics.log_prob, statistics.entropy

    def fused(grad: bool = False) -> tuple[Tensor, Tensor]:
        statistics = policy_statistics(hidden, weight, targets, entropy_grad=grad, **options)
        return statistics.log_prob, statistics.entropy

    def with_gradients(call: Callable[[], tuple[Tensor, ...]]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            log_prob, entropy = call()[:2]
            (log_prob - 0.01 * entropy).sum().backward()

        return run

    def measure(call: Callable[[], Any], repeats: int = args.repeats) -> dict[str, Any]:
        return measured(call, repeats, group, device)

    with torch.no_grad():
        result = {
            "sum of the logits": measure(lambda: logits.sum(-1)),
            "copy of the logits": measure(lambda: logits.clone()),
            "projection alone": measure(lambda: hidden @ weight.t()),
            "textbook, no grad": measure(lambda: textbook(logits, targets, group)),
            "head, no grad": measure(lambda: head(logits)),
            "projection + textbook, no grad": measure(lambda: textbook(hidden @ weight.t(), targets, group)),
            "fused head, no grad": measure(fused),
        }
    hidden.requires_grad_()
    weight.requires_grad_()
    few = max(1, args.repeats // 2)
    result["projection + textbook, forward + backward"] = measure(with_gradients(lambda: textbook(hidden @ weight.t(), targets, group)), few)
    result["projection + head, forward + backward"] = measure(with_gradients(lambda: head(hidden @ weight.t(), grad=True)), few)
    result["fused head, forward + backward"] = measure(with_gradients(lambda: fused(grad=True)), few)
    return result


def _worker(rank: int, args: argparse.Namespace, tp: int, folder: str) -> None:
    torch.set_num_threads(1)
    group = None
    if tp > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=tp)
        group = dist.group.WORLD
    result = benchmark_rank(args, tp, group, torch.device("cpu"))
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    if tp > 1:
        dist.destroy_process_group()


def on_cpu(args: argparse.Namespace, tp: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_worker, (args, tp, folder), nprocs=tp, join=False, start_method="spawn")
        deadline = time.monotonic() + LIMIT_S
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"the benchmark at TP {tp} took longer than {LIMIT_S} s")
        return json.loads(Path(folder, "result.json").read_text())


FIRST_CALL = """
import time, torch
start = time.perf_counter()
from otb_megatron.ops.statistics import policy_statistics_from_logits
x = torch.zeros(2, 8, requires_grad=True)
policy_statistics_from_logits(x, torch.zeros(2, dtype=torch.long), vocab_size=8).log_prob.sum().backward()
print(time.perf_counter() - start)
"""


def first_call_s() -> dict[str, float]:
    """Import, compilation and first forward and backward pass on a CPU: with an empty cache, and in the next process."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}

        def run() -> float:
            done = subprocess.run([sys.executable, "-c", FIRST_CALL], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
            return round(float(done.stdout), 2)

        return {"empty cache": run(), "warm cache": run()}


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Of the best times: other work on the machine can only add to a time."""
    ms = {name: values["best_ms"] for name, values in result.items()}
    return {
        "textbook / head, no grad": round(ms["textbook, no grad"] / ms["head, no grad"], 2),
        "rate of the head / rate of a sum": round(ms["sum of the logits"] / ms["head, no grad"], 2),
        "(projection + textbook) / fused, forward + backward": round(ms["projection + textbook, forward + backward"] / ms["fused head, forward + backward"], 2),
        "(projection + head) / fused, forward + backward": round(ms["projection + head, forward + backward"] / ms["fused head, forward + backward"], 2),
    }


def gpu_rates(args: argparse.Namespace, result: dict[str, Any]) -> dict[str, float]:
    """Shares of the device's own rates: a copy moves each byte twice, the head reads it once."""
    ms = {name: values["best_ms"] for name, values in result.items()}
    read_bytes, flop = 2 * args.tokens * args.vocab, 2 * args.tokens * args.vocab * args.hidden
    return {
        "head, no grad: GB/s": round(read_bytes / ms["head, no grad"] / 1e6, 1),
        "copy: GB/s": round(2 * read_bytes / ms["copy of the logits"] / 1e6, 1),
        "fused head, no grad: TFLOP/s": round(flop / ms["fused head, no grad"] / 1e9, 1),
        "projection alone: TFLOP/s": round(flop / ms["projection alone"] / 1e9, 1),
    }


def table(report: dict[str, Any]) -> str:
    lines = ["| device | case | best ms | median ms | peak extra MiB | collectives | bytes |", "|---|---|---|---|---|---|---|"]
    for place, result in report["results"].items():
        for name, r in result.items():
            lines.append("| " + " | ".join(str(x) for x in (place, name, *r.values())) + " |")
    for place, values in report["ratios"].items():
        lines += [f"{place}: {name} = {value}" for name, value in values.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()

    report: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_1min": os.getloadavg()[0]},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "shape": {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden, "threads_per_rank": 1},
        "first_call_s": first_call_s(),
        "results": {f"cpu TP{tp}": on_cpu(args, tp) for tp in (1, 2)},
    }
    report["ratios"] = {place: ratios(result) for place, result in report["results"].items()}
    if torch.cuda.is_available():
        result = benchmark_rank(args, 1, None, torch.device("cuda"))
        report["results"]["cuda TP1"] = result
        report["ratios"]["cuda TP1"] = ratios(result) | gpu_rates(args, result)
    report["machine"]["load_1min_at_end"] = os.getloadavg()[0]
    print(table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
