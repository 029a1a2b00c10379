"""Products of few rows on a CPU, made such that no bit of a token depends on how many other tokens its pack sends the same way.

BLAS multiplies few rows by another kernel, which sums in another order. How few depends on the CPU and on the length of the sums: measured with MKL and
AVX-512, up to 3 rows on one machine, and on another up to 2 of 64 terms, 10 of 256 and 15 of 512 and more; from 16 rows on each row's bits are the
same whatever their number. (Without AVX-512 they are not.) What chooses rows token by token, experts and the statistics head, can be left with so few
of them in an ordinary pack; a pack as a whole is made long enough when it is built (`fewest_tokens`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from otb_megatron.mcore.parallel import Parallel

MIN_ROWS = 16


def missing_rows(values: Tensor) -> int:
    """How many rows `values` [rows, ...] lacks. None at all need none, and a GPU is left alone."""
    return 0 if values.is_cuda or values.size(0) == 0 else max(0, MIN_ROWS - values.size(0))


def fewest_tokens(parallel: Parallel, tensor_parallel_size: int) -> int:
    """Tokens of a whole pack of which every rank has enough rows, also where sequence parallelism splits them."""
    return 0 if parallel.device.type == "cuda" else MIN_ROWS * tensor_parallel_size * parallel.cp_size


def give_enough_rows(expert: torch.nn.Module) -> None:
    """Makes an expert (Megatron's MLP) add zeros to what is too little."""
    forward = expert.forward

    def padded(hidden: Tensor, probs: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        missing = missing_rows(hidden)
        output, bias = forward(F.pad(hidden, (0, 0, 0, missing)), F.pad(probs, (0, missing)), **kwargs) if missing else forward(hidden, probs, **kwargs)
        return output[: hidden.size(0)], bias

    expert.forward = padded  # type: ignore[method-assign]
