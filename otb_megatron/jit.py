"""numba's compiler, as the kernels use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` without the interpreter lock, whose compiled code is kept on disk where it can be.

    numba looks for a writable place in NUMBA_CACHE_DIR, beside the source and in the user's cache directory. Where there is none (a
    read-only image, a user without a home), every process compiles for itself, which costs it a few seconds.

    Args:
        options: numba's, e.g. `fastmath`.
    """

    def compiler(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(nogil=True, cache=True, **options)(function)
        except RuntimeError:  # "no locator available": numba has no narrower exception for it
            return numba.njit(nogil=True, **options)(function)

    return compiler
