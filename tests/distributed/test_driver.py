"""An error on one rank ends all of them, and exactly one of them tells why."""

from __future__ import annotations

import time
from typing import Any

from otb_megatron.config import ParallelConfig
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.trainer.driver import Driver, FailedElsewhere
from otb_megatron.types import UserError
from tests.distributed.launcher import run_ranks


def _outcome(work: Any) -> tuple[str, str, bool]:
    try:
        return "returned", repr(work()), False
    except UserError as error:
        return type(error).__name__, str(error), isinstance(error, FailedElsewhere)


def _failures(rank: int, world_size: int) -> dict[str, Any]:
    parallel = start_parallel(ParallelConfig(), seed=0, deadline_s=30)
    driver = Driver(parallel)

    def fails(what: str) -> None:
        raise UserError(what)

    outcomes = {
        "fine": _outcome(lambda: driver.run("counting", lambda: 42)),
        "driver": _outcome(lambda: driver.run("reading", lambda: fails("the file is gone"))),
        "one rank": _outcome(lambda: driver.together("loading", lambda: fails("bad shard") if rank == 1 else rank)),
        "all ranks": _outcome(lambda: driver.together("loading", lambda: rank * 10)),
        "shared": driver.share("a number", 5 if rank == 0 else None),
        "scattered": driver.scatter("a letter", ["a", "b"] if rank == 0 else None),
        "gathered": driver.gather("ranks", rank),
    }
    stop_parallel()
    return outcomes


def test_one_rank_tells_and_all_end() -> None:
    first, second = run_ranks(_failures, 2, timeout_s=240)
    assert first["fine"] == ("returned", "42", False) and second["fine"] == ("returned", "None", False)
    assert first["driver"] == ("UserError", "the file is gone", False)
    assert second["driver"] == (FailedElsewhere.__name__, "the driver failed in reading", True)
    assert first["one rank"] == (FailedElsewhere.__name__, "rank 1 failed in loading", True)
    assert second["one rank"] == ("UserError", "bad shard", False)
    assert (first["all ranks"][1], second["all ranks"][1]) == ("0", "10")
    assert (first["shared"], second["shared"]) == (5, 5)
    assert (first["scattered"], second["scattered"]) == ("a", "b")  # two model replicas
    assert (first["gathered"], second["gathered"]) == ([0, 1], [])


def _a_rank_that_does_not_come(rank: int, world_size: int) -> tuple[str, float]:
    parallel = start_parallel(ParallelConfig(), seed=0, deadline_s=3)
    driver = Driver(parallel)
    started = time.monotonic()
    try:
        if rank == 0:
            driver.gather("the statistics", 1)
        else:
            time.sleep(8)
    except UserError as error:
        return str(error), time.monotonic() - started
    return "nothing happened", time.monotonic() - started


def test_a_wait_ends_at_the_deadline_and_says_what_it_waited_for() -> None:
    """Rank 1 lives but is busy elsewhere for 8 s; the deadline is 3 s."""
    told, waited_s = run_ranks(_a_rank_that_does_not_come, 2, timeout_s=240)[0]
    assert "waited for the statistics in vain" in told
    assert 2 < waited_s < 7
