"""Random projection of vectors that are too long to keep, so that their inner products survive."""

from __future__ import annotations

import torch
from torch import Tensor


class CountSketch:
    """A linear map of [num_coordinates] to [size]: every coordinate is added to one random place with a random sign.

        E <Sx, Sy> = <x, y>        Var <Sx, Sy> = (|x|^2 |y|^2 + <x, y>^2 - 2 sum_i x_i^2 y_i^2) / size

    over the random places and signs (Charikar, Chen and Farach-Colton 2002; Weinberger et al., arXiv 0902.2206, lemma 2), so a
    squared norm has a relative standard error of at most sqrt(2 / size). It costs one pass over the vector, whatever the size.
    Where a vector is no longer than the sketch it is kept as it is, without error. The same seed gives the same map on every device.
    """

    def __init__(self, num_coordinates: int, size: int, *, seed: int, device: torch.device) -> None:
        self.size = min(size, num_coordinates)
        self.is_exact = num_coordinates <= size
        if not self.is_exact:
            # Place and sign in one number: places of the second half count negatively.
            places = torch.randint(2 * size, (num_coordinates,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
            self._places = places.to(device)

    @property
    def relative_error(self) -> float:
        """Bound of the relative standard error of a squared norm."""
        return 0.0 if self.is_exact else (2 / self.size) ** 0.5

    def __call__(self, values: Tensor) -> Tensor:
        """float32 [num_coordinates] -> float32 [size]."""
        if self.is_exact:
            return values.clone()
        sums = values.new_zeros(2 * self.size).index_add_(0, self._places, values)
        return sums[: self.size] - sums[self.size :]
