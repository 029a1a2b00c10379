"""How a range of a flattened parameter is cut into rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from otb_megatron.mcore.optimizer_state import rectangles


def _spans(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    size = math.prod(shape)
    return ((start, stop) for start in range(size + 1) for stop in range(start, size + 1))


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (4, 1), (1, 5), (2, 1, 3)])
def test_rectangles_of_every_span(shape: tuple[int, ...]) -> None:
    """Put together in order, the rectangles' elements are those of the span of the flattened tensor."""
    whole = torch.arange(math.prod(shape)).view(shape)
    for start, stop in _spans(shape):
        found = list(rectangles(shape, start, stop))
        assert len(found) <= 2 * len(shape) - 1
        parts = [whole[tuple(slice(first, first + size) for first, size in zip(offset, sizes, strict=True))] for offset, sizes in found]
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts] or [whole[:0].reshape(-1)]), whole.view(-1)[start:stop])
