"""Compiles the numba kernels once and leaves them in numba's cache, so that no run has to.

    python -m tools.compile_kernels

`make setup` does it. It saves a first run two seconds, and makes it compute what later runs do: numba's code in the process that
compiled it may round otherwise, in the last bit, than the same code loaded from the cache.
"""

from __future__ import annotations

import torch

from otb_megatron.algorithms import optimal_token_baseline_numba
from otb_megatron.ops.statistics import policy_statistics_from_logits


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
        policy_statistics_from_logits(logits, torch.zeros(2, dtype=torch.int64), vocab_size=8).log_prob.sum().backward()
    offsets, group, energy = torch.tensor([0, 2, 4]), torch.tensor([0, 0]), torch.ones(4)
    for rewards in (torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.ones(4)):  # at the end alone, and at every action
        for correction in (None, torch.ones(4)):
            for compiled in (optimal_token_baseline_numba.advantages, optimal_token_baseline_numba.advantages_loo):
                compiled(rewards, offsets, group, energy, correction, 1.0, "zero", 1e-8)


if __name__ == "__main__":
    main()
