"""What launch/slurm.sbatch does with SLURM's signals. SLURM, Ray and the launcher are stand-ins on PATH."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch/slurm.sbatch"
STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >>"$STATE/scontrol"; fi',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURM_NODEID=0 exec "$@"',
    "python": "echo gpus 8",
    "ray": "exec sleep 60",
    # Ends as a run does that was asked to stop, a moment later; or at once, with the status in $TRAINER_STATUS.
    "otb-megatron": """[ -z "${TRAINER_STATUS:-}" ] || exit "$TRAINER_STATUS"
trap 'sleep 0.5; echo "$@" >"$STATE/saved"; exit 0' USR1
touch "$STATE/started"
while :; do sleep 0.05; done""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "bin").mkdir()
    for name, body in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "17"}
    return os.environ | slurm | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STATE": str(tmp_path)}


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, "requeue 17\n"), (signal.SIGTERM, None)])
def test_a_signal_lets_the_run_save_and_the_time_limit_requeues(environment: dict[str, str], tmp_path: Path, number: signal.Signals, requeued: str) -> None:
    script = subprocess.Popen(["bash", SCRIPT, "run.yaml", "rollout.n=4"], env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert script.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        script.send_signal(number)
        assert script.wait(timeout=60) == 0
        expected = "launch --nnodes 1 --node-rank 0 --nproc-per-node 8 --rdzv-endpoint node1:29500 train run.yaml rollout.n=4 rollout.ray_address=node1:6379\n"
        assert (tmp_path / "saved").read_text() == expected
        asked = tmp_path / "scontrol"
        assert (asked.read_text() if asked.exists() else None) == requeued
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def test_a_failure_is_the_job_s_failure(environment: dict[str, str], tmp_path: Path) -> None:
    script = subprocess.Popen(["bash", SCRIPT, "run.yaml"], env=environment | {"TRAINER_STATUS": "2"}, start_new_session=True)
    try:
        assert script.wait(timeout=60) == 2
        assert not (tmp_path / "scontrol").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
