"""Products of few rows on a CPU, made such that no bit of a token depends on how many other tokens its pack sends the same way.

BLAS multiplies few rows by another kernel, which sums in another order: with one, two or three rows MKL gives other bits, from four on
each row's bits are the same whatever their number (measured). What chooses rows token by token, experts and the statistics head, can be
left with so few of them in an ordinary pack. A whole pack of less than four tokens on a rank is left as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_ROWS = 4


def missing_rows(values: Tensor) -> int:
    """How many rows `values` [rows, ...] lacks. None at all need none, and a GPU is left alone."""
    return 0 if values.is_cuda or values.size(0) == 0 else max(0, MIN_ROWS - values.size(0))


def give_enough_rows(expert: torch.nn.Module) -> None:
    """Makes an expert (Megatron's MLP) add zeros to what is too little."""
    forward = expert.forward

    def padded(hidden: Tensor, probs: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        missing = missing_rows(hidden)
        output, bias = forward(F.pad(hidden, (0, 0, 0, missing)), F.pad(probs, (0, missing)), **kwargs) if missing else forward(hidden, probs, **kwargs)
        return output[: hidden.size(0)], bias

    expert.forward = padded  # type: ignore[method-assign]
