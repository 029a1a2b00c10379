"""30 kills at random moments of a run, in every phase of a step: `make test-faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.killing import assert_same, complete, complete_with_kills, make_run

NUM_STEPS = 64  # a kill comes after two steps at most, so that 30 kills fit


@pytest.mark.timeout(1200)
def test_thirty_kills_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed in rollout, statistics, update, weight sync and save, half of the processes saving in the background; see `assert_same`."""
    values = make_run(tmp_path, NUM_STEPS)
    whole = complete(values, tmp_path / "whole", None, timeout_s=600)
    killed = complete_with_kills(values, tmp_path / "killed", tmp_path / "whole" / "rollouts", num_kills=30, seed=0, timeout_s=600)
    with capsys.disabled():
        print(f"\nkills by place: {dict(killed.kills.most_common())}")
    assert killed.kills.total() == 30
    for place in ("rollout", "update", "checkpoint", "weights"):
        assert any(where.startswith(place) for where in killed.kills), f"no kill hit {place}"
    assert_same(killed, whole)
