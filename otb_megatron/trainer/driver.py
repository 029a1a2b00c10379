"""Rank 0's work in an SPMD program: done once, and its success or failure made known to every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from otb_megatron.mcore.parallel import Parallel
from otb_megatron.types import UserError

Result = TypeVar("Result")


class FailedElsewhere(UserError):
    """Another rank failed and reports why; this one only ends."""


def tell(error: BaseException | None, rank: int) -> None:
    """Prints what a user can mend, at once: what follows (closing engines, ending ranks) may take seconds, or be cut short."""
    if isinstance(error, UserError) and not isinstance(error, FailedElsewhere) and not error.told:
        print(f"{'' if rank == 0 else f'rank {rank}: '}error: {error}", file=sys.stderr, flush=True)
        error.told = True


@contextmanager
def found_by_all(rank: int) -> Iterator[None]:
    """Around checks that every rank makes alike, before there is a driver: rank 0 tells what is wrong, the others only end."""
    try:
        yield
    except UserError as error:
        if rank == 0:
            raise
        raise FailedElsewhere("rank 0 finds the same faults") from error


class Driver:
    """Messages between rank 0, the driver, and all ranks over a gloo group on the host.

    Every method is collective over the world. A wait ends after the control group's deadline with an error that names
    what was waited for.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self.is_driver, self.rank, self.world_size = parallel.is_driver, parallel.rank, parallel.world_size
        self.replica_of_rank: list[int] = [0] * parallel.world_size  # data-parallel rank of every rank
        self._wait("the start of all ranks", dist.all_gather_object, self.replica_of_rank, parallel.dp_rank)

    def run(self, what: str, work: Callable[[], Result]) -> Result | None:
        """Runs `work` on the driver while the others wait. Returns its result there and None elsewhere.

        An exception on the driver ends every rank: a UserError with its message, anything else as itself on the driver and
        as FailedElsewhere on the others.
        """
        result, error = None, None
        if self.is_driver:
            try:
                result = work()
            except Exception as caught:
                error = caught
        (failed,) = self._broadcast(what, [error is not None])
        if error is not None:
            raise error
        if failed:
            raise FailedElsewhere(f"the driver failed in {what}")
        return result

    def together(self, what: str, work: Callable[[], Result]) -> Result:
        """Runs `work`, which must contain no collective, on every rank; if any fails, all raise and the first to fail tells why."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failures = self.exchange(what, error is not None)
        if error is not None and failures.index(True) == self._parallel.rank:
            raise error
        if any(failures):
            raise FailedElsewhere(f"rank {failures.index(True)} failed in {what}")
        return result  # type: ignore[return-value]

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value` in rank order, on every rank."""
        received: list[Any] = [None] * self._parallel.world_size
        self._wait(what, dist.all_gather_object, received, value)
        return received

    def share(self, what: str, value: Any) -> Any:
        """The driver's `value` on every rank."""
        return self._broadcast(what, [value])[0]

    def scatter(self, what: str, values_of_replicas: Sequence[Any] | None) -> Any:
        """Gives every rank the value of its model replica. The driver passes one value a replica, the others None."""
        values = None if values_of_replicas is None else [values_of_replicas[replica] for replica in self.replica_of_rank]
        received = [None]
        self._wait(what, dist.scatter_object_list, received, values, src=0)
        return received[0]

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's `value` in rank order on the driver, an empty list elsewhere."""
        received: list[Any] | None = [None] * self._parallel.world_size if self.is_driver else None
        self._wait(what, dist.gather_object, value, received, dst=0)
        return received or []

    def _broadcast(self, what: str, values: list[Any]) -> list[Any]:
        self._wait(what, dist.broadcast_object_list, values, src=0)
        return values

    def _wait(self, what: str, collective: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, group=self._parallel.control, **kwargs)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"waited for {what} in vain: another rank ended, or trainer.deadline_s passed ({reason})") from error
