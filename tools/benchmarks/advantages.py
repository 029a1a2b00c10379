"""Cost of the Optimal Token Baseline on the driver.

    python tools/benchmarks/advantages.py --json advantages.json

In one run: the public function, its plain tensor form, grpo, and a padded loop over groups as systems with padded batches have
it, on the same batch of 256 groups of 16 responses with log-normal lengths up to 4096. Then the public function alone on
batches of growing size. Times are the best of several calls; memory is the peak beyond what the inputs take, from Linux's
own counter (/proc/self/status), which counts whole pages.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numba
import numpy as np
import torch
from torch import Tensor

from otb_megatron.algorithms import AdvantageInputs, estimate
from otb_megatron.algorithms.optimal_token_baseline import tensor_form


@dataclass(frozen=True)
class Measurement:
    name: str
    actions: int
    seconds: float
    actions_per_second: float
    peak_extra_bytes: int


def make_batch(num_actions: int, group_size: int, max_length: int, seed: int = 0) -> AdvantageInputs:
    """Whole groups with log-normal lengths (median 720, sigma 0.7, as long-answer tasks have them), until `num_actions` are reached."""
    rng = np.random.default_rng(seed)
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < num_actions:
        more = rng.lognormal(np.log(720), 0.7, size=(256, group_size)).clip(1, max_length).astype(np.int64).ravel()
        lengths = np.concatenate((lengths, more))
    lengths = lengths[: group_size * max(1, int(np.searchsorted(lengths.cumsum(), num_actions)) // group_size)]
    offsets = torch.from_numpy(np.concatenate(([0], lengths.cumsum())))
    rewards = torch.zeros(int(offsets[-1]))
    rewards[offsets[1:] - 1] = torch.from_numpy(rng.integers(0, 2, len(lengths)).astype(np.float32))
    energy = torch.rand(rewards.numel(), generator=torch.Generator().manual_seed(seed)).pow_(4)
    group = torch.from_numpy(rng.permutation(len(lengths)) // group_size)  # members interleaved
    return AdvantageInputs(rewards, offsets, group, energy=energy)


def pad(values: Tensor, offsets: Tensor) -> Tensor:
    """[actions] -> [samples, longest]."""
    lengths = offsets.diff()
    out = values.new_zeros(lengths.numel(), int(lengths.max()))
    out[torch.arange(out.shape[1]) < lengths[:, None]] = values
    return out


def padded_loop(rewards: Tensor, mask: Tensor, energy: Tensor, group: Tensor, group_size: int) -> Tensor:
    """[samples, longest]: the same numbers (tail: zero) from padded arrays, one group after the other. Written for this comparison."""
    returns = (rewards * mask).flip(1).cumsum(1).flip(1)
    realized = (energy * mask).cumsum(1)
    baseline = torch.zeros_like(returns)
    for id in group.unique().tolist():
        members = (group == id).nonzero().flatten()
        alive = mask[members]
        weight = realized[members] * alive
        shared = (returns[members] * weight).sum(0) / weight.sum(0).clamp(min=1e-30)
        baseline[members] = torch.where(alive.sum(0) > 1, shared, 0.0).expand(group_size, -1)
    return (returns - baseline) * mask


def measure(name: str, actions: int, call: Callable[[], object], repeats: int) -> Measurement:
    call()  # compilation and first touch of memory
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory that was freed and kept would be taken again without being counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Measurement(name, actions, min(seconds), actions / min(seconds), max(0, _status("VmHWM") - before))


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def compare(inputs: AdvantageInputs, group_size: int) -> list[Measurement]:
    actions = inputs.rewards.numel()
    results = [
        measure("optimal_token_baseline", actions, lambda: estimate("optimal_token_baseline", inputs, {}), 5),
        measure("optimal_token_baseline_loo", actions, lambda: estimate("optimal_token_baseline_loo", inputs, {}), 3),
        measure("grpo", actions, lambda: estimate("grpo", inputs, {}), 5),
    ]
    fields = (inputs.rewards, inputs.offsets, inputs.group, inputs.energy, None, 1.0, "zero", 1e-10)
    results.append(measure("tensor form", actions, lambda: tensor_form(*fields), 3))
    mask, rewards, energy = (pad(x, inputs.offsets) for x in (torch.ones_like(inputs.rewards), inputs.rewards, inputs.energy))
    results.append(measure("padded loop", actions, lambda: padded_loop(rewards, mask, energy, inputs.group, group_size), 2))
    padded = padded_loop(rewards.double(), mask.double(), energy.double(), inputs.group, group_size)[mask.bool()]
    torch.testing.assert_close(estimate("optimal_token_baseline", inputs, {}).double(), padded, rtol=0, atol=1e-6)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actions", type=int, default=3_700_000, help="actions of the comparison (default: %(default)s)")
    parser.add_argument("--growth", type=int, nargs="*", default=[1_000_000, 10_000_000, 100_000_000], help="sizes for the public function alone")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()

    results = compare(make_batch(arguments.actions, arguments.group_size, arguments.max_length), arguments.group_size)
    for size in arguments.growth:
        inputs = make_batch(size, arguments.group_size, arguments.max_length)
        results.append(measure("growth", inputs.rewards.numel(), lambda inputs=inputs: estimate("optimal_token_baseline", inputs, {}), 2))

    print(f"{'':28}{'actions':>12}{'seconds':>10}{'M actions/s':>13}{'peak extra MiB':>16}")
    for r in results:
        print(f"{r.name:28}{r.actions:12,}{r.seconds:10.4f}{r.actions_per_second / 1e6:13.1f}{r.peak_extra_bytes / 2**20:16.0f}")
    by_name = {r.name: r for r in results}
    ours, loop = by_name["optimal_token_baseline"], by_name["padded loop"]
    print(f"against the padded loop: {loop.seconds / ours.seconds:.0f} times faster, {ours.peak_extra_bytes / loop.peak_extra_bytes:.2f} of its memory")
    if arguments.json:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numba": numba.__version__}
        machine = {"cpus": len(os.sched_getaffinity(0)), "torch_threads": torch.get_num_threads()}
        arguments.json.write_text(json.dumps({"versions": versions, "machine": machine, "results": [asdict(r) for r in results]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
