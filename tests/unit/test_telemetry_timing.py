"""Phase seconds against a clock that the test moves."""

import time

import pytest

from otb_megatron.telemetry.timing import PhaseTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_repeated_and_nested_phases_add_up_to_the_time_spent():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 50  # before any phase: nobody's
    with timer.phase("update"):
        clock.now += 1
        with timer.phase("weights"):
            clock.now += 10
            with timer.phase("update"):
                clock.now += 100
        clock.now += 1000
    clock.now += 7
    with timer.phase("weights"):
        clock.now += 10000
    assert timer.seconds() == {"update": 1101.0, "weights": 10010.0}  # 1 + 100 + 1000 and 10 + 10000
    assert list(timer.seconds()) == ["update", "weights"]


def test_a_phase_that_raises_is_counted_and_closed():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError), timer.phase("reward"):
        clock.now += 2
        raise RuntimeError
    clock.now += 5
    assert timer.seconds() == {"reward": 2.0}


def test_open_phases_count_up_to_now_and_run_on_after_a_reset():
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("rollout"):
        pass
    with timer.phase("update"):
        clock.now += 3
        assert timer.seconds() == {"rollout": 0.0, "update": 3.0}
        timer.reset()
        clock.now += 4
    assert timer.seconds() == {"update": 4.0}
    timer.reset()
    assert timer.seconds() == {}


def test_measures_wall_time():
    timer = PhaseTimer()
    with timer.phase("sleep"):
        time.sleep(0.02)
    assert 0.02 <= timer.seconds()["sleep"] < 5
