"""The launcher returns results in rank order, reports each rank's failure, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.distributed.launcher import RanksFailed, run_ranks


def sum_of_ranks(rank, world_size, scale):
    value = torch.full((2,), scale * rank)
    dist.all_reduce(value)
    return rank, value


def one_raises_one_hangs(rank, world_size):
    subprocess.Popen(["sleep", "1000"])
    print(f"rank {rank} has pid {os.getpid()}", flush=True)
    if rank == 1:
        raise ValueError("the fault of rank one")
    wait_forever()


def wait_forever():
    time.sleep(1000)


def waits_for_a_rank_that_sleeps(rank, world_size):
    if rank == 1:
        wait_forever()
    dist.barrier()


def test_results_come_in_rank_order():
    results = run_ranks(sum_of_ranks, 3, 0.5, timeout_s=60)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for _, value in results:
        assert value.tolist() == [1.5, 1.5]  # 0.5 (0 + 1 + 2)


def test_failure_names_every_rank_and_leaves_nothing_behind():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_raises_one_hangs, 2, timeout_s=60)
    message = str(caught.value)
    assert time.monotonic() - start < 30  # the grace time after the first failure, not the limit
    assert "rank 1 failed with exit code 1" in message and "ValueError: the fault of rank one" in message
    assert "rank 0 was still running" in message and "in wait_forever" in message
    groups = {int(line.split()[-1]) for line in message.splitlines() if "has pid" in line}  # the rank and its `sleep` share a process group
    assert len(groups) == 2
    deadline = time.monotonic() + 5
    while alive := _members_of(groups):
        assert time.monotonic() < deadline, alive


def test_the_deadline_ends_every_rank_and_shows_each_stack():
    """A rank that waits in a collective, below Python, shows the line that waits as well."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        run_ranks(waits_for_a_rank_that_sleeps, 3, timeout_s=8)
    assert time.monotonic() - start < 8 + 10  # the limit, and a second for the stacks to be written
    message = str(caught.value)
    for rank in range(3):
        part = message.split(f"--- rank {rank} ")[1].split("--- rank")[0]
        assert "was still running and was stopped (limit 8 s" in part and "in waits_for_a_rank_that_sleeps" in part
        assert ("in wait_forever" if rank == 1 else "in barrier") in part


def _members_of(groups):
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return alive
