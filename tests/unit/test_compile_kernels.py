"""After `tools.compile_kernels` a run finds every kernel in numba's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUN = """
import torch
from otb_megatron.algorithms import optimal_token_baseline_numba as otb
from otb_megatron.ops import row_sums_numba as head
from otb_megatron.ops.statistics import policy_statistics
hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(11, 3, requires_grad=True)
policy_statistics(hidden, weight, torch.arange(5), vocab_size=11, temperature=0.7, entropy_grad=True).log_prob.sum().backward()
offsets, group, rewards = torch.tensor([0, 3, 4, 6]), torch.tensor([0, 0, 1]), torch.rand(6)
for compiled in (otb.advantages, otb.advantages_loo):
    for correction in (None, torch.rand(6)):
        compiled(rewards, offsets, group, torch.rand(6), correction, 0.9, "hold", 1e-6)
kernels = (head._sums, head._gradients, otb._plain, otb._leave_one_out)
print([sum(kernel.stats.cache_misses.values()) for kernel in kernels], [bool(kernel.stats.cache_hits) for kernel in kernels])
"""


def test_no_kernel_is_compiled_after_it(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> str:
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True, timeout=240).stdout

    run("-m", "tools.compile_kernels")
    assert run("-c", RUN).strip() == "[0, 0, 0, 0] [True, True, True, True]"


def test_kernels_run_where_nothing_can_be_cached() -> None:
    """A read-only image and a user without a home leave numba no place for its cache; the baseline is that of the tensor form all the same."""
    script = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
import torch
from otb_megatron.algorithms import optimal_token_baseline as otb
from otb_megatron.algorithms import optimal_token_baseline_numba as compiled
from otb_megatron.ops import row_sums_numba as head
fields = torch.rand(6), torch.tensor([0, 3, 4, 6]), torch.tensor([0, 0, 1]), torch.rand(6), None, 1.0, "zero", 1e-8
print(torch.allclose(compiled.advantages(*fields), otb.tensor_form(*fields)), head._sums.stats.cache_path)
"""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert (ended.stdout.strip(), ended.returncode) == ("True None", 0), ended.stderr
