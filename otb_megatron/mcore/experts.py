"""Experts whose results do not depend on how many tokens chose them. For layer specs without Transformer Engine on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# BLAS multiplies fewer rows than this by another kernel, which sums in another order: with one, two or three rows MKL gives other bits,
# from four on each row's bits are the same whatever their number (measured).
MIN_ROWS = 4


def give_enough_rows(expert: torch.nn.Module) -> None:
    """Makes an expert (Megatron's MLP) compute at least MIN_ROWS rows, so that no bit of a token depends on its pack's other tokens."""
    forward = expert.forward

    def padded(hidden: Tensor, probs: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        missing = MIN_ROWS - hidden.size(0)
        if missing <= 0 or missing == MIN_ROWS:
            return forward(hidden, probs, **kwargs)
        output, bias = forward(F.pad(hidden, (0, 0, 0, missing)), F.pad(probs, (0, missing)), **kwargs)
        return output[: hidden.size(0)], bias

    expert.forward = padded  # type: ignore[method-assign]
