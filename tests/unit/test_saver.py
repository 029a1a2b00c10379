"""When the end of a step saves, completes and stops; the ranks, the clock and the disk are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otb_megatron.trainer import saver
from otb_megatron.trainer.saver import Saver

NUM_STEPS = 10


class _Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class _Learner:
    """Writes down what is asked of it; a checkpoint in the background is on the disk when the test says so."""

    def __init__(self, root: Path) -> None:
        self.checkpoints = root
        self.events: list[Any] = []
        self.is_written = True

    def start_save(self, step: int) -> Any:
        self.events.append(f"start {step}")
        learner = self

        class Writing:
            @property
            def is_written(self) -> bool:
                return learner.is_written

        return Writing()

    def complete_save(self, writing: Any, state: dict[str, Any], *, is_best: bool) -> None:
        self.events.append(f"complete {state['step']}" + (" best" if is_best else ""))


@pytest.fixture
def learner(tmp_path: Path) -> _Learner:
    return _Learner(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    found = _Clock()
    monkeypatch.setattr(saver, "time", found)
    return found


@pytest.fixture
def others() -> list[Any]:
    """Reports of the other ranks."""
    return []


@pytest.fixture
def build(learner: _Learner, others: list[Any], clock: _Clock) -> Iterator[Any]:
    built: list[Saver] = []

    def make(resumed_from: Path | None = None, **settings: Any) -> Saver:
        section = dict(interval=0, interval_s=0.0, keep_last=2, keep_best=False, async_save=False) | settings
        config: Any = SimpleNamespace(checkpoint=SimpleNamespace(**section), trainer=SimpleNamespace(num_steps=NUM_STEPS))
        driver: Any = SimpleNamespace(run=lambda what, work: work(), exchange=lambda what, mine: [mine, *others])
        built.append(Saver(config, learner, driver, resumed_from))  # type: ignore[arg-type]
        return built[-1]

    yield make
    for one in reversed(built):  # each gives the signals back as it found them
        one.close()


def test_after_every_third_step_and_the_last(build: Any, learner: _Learner) -> None:
    saving = build(interval=3)
    for step in range(1, NUM_STEPS + 1):
        assert saving.after_step(step, {}, None) is None
    assert learner.events == [event for step in (3, 6, 9, 10) for event in (f"start {step}", f"complete {step}")]


def test_by_the_clock_since_the_last_save(build: Any, learner: _Learner, clock: _Clock) -> None:
    """Steps of 40 s, saved when 100 s have passed: after 120 s (step 3), and 120 s later again."""
    saving = build(interval_s=100)
    for step in range(1, 8):
        clock.now_s += 40
        saving.after_step(step, {}, None)
    assert [event for event in learner.events if event.startswith("start")] == ["start 3", "start 6"]


def test_each_best_is_saved(build: Any, learner: _Learner) -> None:
    saving = build(keep_best=True)
    for step, accuracy in enumerate([0.1, None, 0.3, 0.3, 0.2, 0.4], start=1):
        saving.after_step(step, {}, accuracy)
    assert [event for event in learner.events if event.startswith("complete")] == ["complete 1 best", "complete 3 best", "complete 6 best"]


def test_a_resumed_run_remembers_the_best(build: Any, learner: _Learner) -> None:
    """0.3 at step 2 counts after a resume from step 4, and not after a return to step 1."""
    best = learner.checkpoints / "step_00000002"
    best.mkdir()
    networks = {"policy": {"use_distributed_optimizer": True, "model": {"path": "model", "config": {}}}}
    (best / "state.json").write_text(json.dumps({"step": 2, "accuracy": 0.3, "networks": networks, "format_version": 1}))
    (learner.checkpoints / "best").write_text("step_00000002\n")
    build(learner.checkpoints / "step_00000004", keep_best=True).after_step(5, {}, 0.2)
    assert learner.events == []
    build(learner.checkpoints / "step_00000001", keep_best=True).after_step(2, {}, 0.2)
    assert learner.events == ["start 2", "complete 2 best"]


def test_a_signal_that_another_rank_got_stops_this_one_too(build: Any, learner: _Learner, others: list[Any]) -> None:
    saving = build(async_save=True)
    assert saving.after_step(1, {}, None) is None
    others.append(saver._Report(signal="SIGTERM", is_written=True, due=False, is_best=False))
    stopped = saving.after_step(2, {}, None)
    assert (stopped.signal, stopped.step, stopped.directory.name) == ("SIGTERM", 2, "step_00000002")
    assert learner.events == ["start 2", "complete 2"]
    assert saving.after_step(NUM_STEPS, {}, None) is None  # the last step ends the run anyway


def test_a_background_save_is_completed_when_all_have_written_and_before_the_next(build: Any, learner: _Learner, others: list[Any]) -> None:
    saving = build(async_save=True, interval=4)
    others.append(saver._Report(signal=None, is_written=False, due=False, is_best=False))
    for step in range(1, 6):
        saving.after_step(step, {"step of the state": step}, None)
    assert learner.events == ["start 4"]  # another rank still writes
    others.clear()
    saving.after_step(6, {}, None)
    assert learner.events == ["start 4", "complete 4"]
    others.append(saver._Report(signal=None, is_written=False, due=False, is_best=False))
    for step in range(7, 11):
        saving.after_step(step, {}, None)
    assert learner.events == ["start 4", "complete 4", "start 8", "complete 8", "start 10", "complete 10"]
