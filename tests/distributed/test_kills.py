"""A run that is killed or stopped a few times and resumed ends as the uninterrupted one; `make test-faults` kills 30 times."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from otb_megatron.mcore import checkpoint
from tests.distributed.killing import Outcome, assert_same, complete, complete_with_kills, make_run, stop_by_signal

NUM_STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Outcome]:
    """Settings, and an uninterrupted run with them."""
    work = tmp_path_factory.mktemp("whole")
    values = make_run(work, NUM_STEPS)
    return values, complete(values, work / "run", None, timeout_s=250)


def test_two_kills_change_nothing(whole: tuple[dict[str, Any], Outcome], tmp_path: Path) -> None:
    """One about the first rollout and one about the statistics pass, saved in the background; see `assert_same` for what is compared."""
    values, expected = whole
    killed = complete_with_kills(values, tmp_path / "killed", expected.output_dir / "rollouts", num_kills=2, seed=0, timeout_s=250)
    assert killed.kills.total() == 2
    assert_same(killed, expected)


@pytest.mark.parametrize(("number", "rank", "async_save"), [(signal.SIGUSR1, 1, False), (signal.SIGTERM, 0, True)])
def test_a_signal_to_one_rank_saves_the_running_step_and_ends_all(
    whole: tuple[dict[str, Any], Outcome], tmp_path: Path, number: signal.Signals, rank: int, async_save: bool
) -> None:
    """Every rank ends with status 0 and the driver says so in one line; what is resumed from there ends as the uninterrupted run."""
    values, expected = whole
    values = values | {"checkpoint": {"interval": 0, "keep_best": False}}
    recording, output_dir = expected.output_dir / "rollouts", tmp_path / "stopped"
    printed = stop_by_signal(values, output_dir, recording, number, rank, async_save=async_save, timeout_s=250)
    directory = checkpoint.latest(output_dir / "checkpoints")
    assert directory is not None
    step = checkpoint.read_state(directory)["step"]
    assert 1 < step < NUM_STEPS and Outcome(output_dir).metrics[-1]["step"] == step
    line = f"stopped by {number.name} after step {step} of {NUM_STEPS}: saved {directory}; the same command continues from there"
    assert [text for text in printed.splitlines() if "stopped" in text] == [line]
    assert not (output_dir / "export").exists()
    resumed = complete(values, output_dir, recording, timeout_s=250)
    assert resumed.metrics == expected.metrics and resumed.sent == expected.sent and resumed.prompt_ids == expected.prompt_ids
