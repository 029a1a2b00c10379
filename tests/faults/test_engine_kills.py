"""Kills while real vLLM engines sample and take weights: `make test-faults`.

A resumed run samples other responses than the killed one would have, so it is compared with an uninterrupted run that is fed what it recorded.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from otb_megatron.mcore import checkpoint
from tests.distributed.killing import (
    IN_BACKGROUND,
    assert_same_weights,
    assert_visits_each_prompt_once,
    check_disk,
    complete,
    make_run,
    place_of,
    started,
    wait_for,
)
from tests.distributed.launcher import Ranks, RanksFailed

NUM_STEPS = 24
START_S = 240.0
# Ray's helpers that hold nothing and notice only by themselves, within about a minute, that their node is gone.
LATE = ("dashboard/agent.py", "runtime_env/agent/main.py")


def _settings(work: Path) -> dict[str, Any]:
    """Of a run with one engine, which samples and receives for long enough to be hit."""
    values = make_run(work, NUM_STEPS)
    deadlines = dict(start_timeout_s=START_S, generate_timeout_s=60, weight_transfer_timeout_s=60)
    rollout = deadlines | dict(max_response_tokens=48, weight_transfer_bucket_bytes=40_000, vllm=dict(max_model_len=64, kv_cache_memory_bytes=32 * 2**20))
    return values | {
        "data": values["data"] | {"validation": None, "max_prompt_tokens": 16},
        "rollout": values["rollout"] | rollout,
        "trainer": values["trainer"] | {"eval_interval": 0, "deadline_s": 2 * START_S},
        "rewards": {"function": "tests.e2e.verifiers:digit_fraction"},
        "checkpoint": {"interval": 1},
    }


def _processes(ranks: Ranks) -> list[psutil.Process]:
    """Both ranks and all they have started, Ray and its engine included."""
    roots = [psutil.Process(pid) for pid in ranks.pids]
    return roots + [process for root in roots for process in root.children(recursive=True)]


def _engine(processes: list[psutil.Process]) -> psutil.Process:
    (engine,) = (process for process in processes if _command(process).startswith("ray::Engine"))
    return engine


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _assert_gone(processes: list[psutil.Process], timeout_s: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    left = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, [(process.pid, _command(process)) for process in left]


@pytest.mark.timeout(1200)
def test_kills_of_engines_driver_and_all_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once while the engine samples, the engine alone while it samples and while weights come, the driver alone in a save.

    Of the run that is resumed each time, every step was sampled by the weights that it trained, and an uninterrupted run that replays
    its samples has the same metrics to the last digit and the same weights bit for bit.
    """
    values, killed = _settings(tmp_path), tmp_path / "killed"
    draw = random.Random(0)
    hits: list[str] = []
    late: list[psutil.Process] = []
    last_saved = 0

    def hit(place: str, target: str, *, in_background: bool = False) -> str:
        """Kills soon after the driver has entered that phase for the second time or a later one, and returns what the ranks that were not killed report."""
        nonlocal last_saved
        with started(values, killed, None, async_save=in_background, real_engines=True, timeout_s=2 * START_S) as (ranks, marker):
            wait_for(ranks, marker, place, times=1)
            processes = _processes(ranks)
            victims = {"engine": _engine(processes).pid, "driver": ranks.pids[0]}
            wait_for(ranks, marker, place, times=2 if in_background else 1)  # a save in the background is complete in the next such phase
            time.sleep(draw.random() * 0.005)
            hits.append(f"{target} in {place_of(marker)}")
            if target == "all":
                ranks.kill()
            else:
                os.kill(victims[target], signal.SIGKILL)
            with pytest.raises(RanksFailed) as failure:
                ranks.results()
        agents = [process for process in processes if any(name in _command(process) for name in LATE)]
        _assert_gone([process for process in processes if process not in agents], 30)
        late.extend(agents)
        saved = check_disk(killed / "checkpoints")
        assert saved > last_saved, "a checkpoint was lost, or the run started anew"
        last_saved = saved
        return str(failure.value)

    hit("rollout", "all")
    for place in ("rollout", "weights"):
        report = hit(place, "engine")
        assert "still running" not in report, report
        assert report.count("error: ") == 1 and "error: engine 0" in report and "died while" in report, report
    report = hit("checkpoint", "driver")
    assert "rank 1 failed with exit code 1" in report, report
    hit("checkpoint", "all", in_background=True)
    with capsys.disabled():
        print(f"\nkills: {', '.join(hits)}")
    assert hits[:4] == ["all in rollout", "engine in rollout", "engine in weights", "driver in checkpoint"]
    assert hits[4] == "all in checkpoint" or hits[4].endswith(IN_BACKGROUND)

    resumed = complete(values, killed, None, real_engines=True, timeout_s=2 * START_S)
    replay = values | {"rollout": values["rollout"] | {"save": False, "replay_dir": str(killed / "rollouts")}}
    whole = complete(replay, tmp_path / "whole", None, real_engines=True, timeout_s=120)

    assert [row["step"] for row in resumed.metrics] == list(range(1, NUM_STEPS + 1))
    assert sum(row["optimizer/grad_norm"] > 0 for row in resumed.metrics) > NUM_STEPS / 2  # two responses may get the same reward
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        assert ours["mismatch/probability_difference"] < 1e-4, "sampled with other weights than the trainer's"
        assert ours.keys() - theirs.keys() == {"rewards/failures", "weights/version"}  # of engines
        assert {name: ours[name] for name in theirs} == theirs
    assert_same_weights(resumed, whole)
    assert_visits_each_prompt_once(resumed)
    newest = checkpoint.latest(killed / "checkpoints")
    assert newest is not None and checkpoint.read_state(newest)["step"] == NUM_STEPS
    _assert_gone(late, 120)
