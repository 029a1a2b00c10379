"""What a run leaves behind: each step once, whole lines only, the same in every sink, also after a crash and a resume."""

import errno
import json
import math
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from otb_megatron.config import TelemetryConfig
from otb_megatron.telemetry.jsonl import JsonLines, read_steps
from otb_megatron.telemetry.recorder import Recorder
from otb_megatron.types import UserError

QUIET = TelemetryConfig(progress=False, tensorboard=False)


def run(output_dir, steps, reward, config=QUIET, first_step=None, resolved_config=None):
    with Recorder(config, output_dir, num_steps=5, first_step=steps[0] if first_step is None else first_step, resolved_config=resolved_config) as recorder:
        for step in steps:
            recorder.log(step, {"rewards/mean": reward})


def rewards_by_step(output_dir):
    return [(row["step"], row["rewards/mean"]) for row in read_steps(output_dir / "metrics.jsonl")]


def test_every_line_is_complete_on_the_disk_when_log_returns(tmp_path):
    with Recorder(QUIET, tmp_path / "new" / "run", num_steps=2, first_step=1, resolved_config=None) as recorder:
        recorder.log(1, {"b": 1, "a": math.nan, "c": -math.inf})
        assert (tmp_path / "new" / "run" / "metrics.jsonl").read_text() == '{"step": 1, "b": 1.0, "a": null, "c": null}\n'


def test_a_resumed_run_replaces_what_the_aborted_one_logged_after_its_checkpoint(tmp_path):
    run(tmp_path, [0, 1, 2, 3], reward=0.25)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rewar')  # killed while writing
    run(tmp_path, [2, 3, 4, 5], reward=0.75)
    assert rewards_by_step(tmp_path) == [(0, 0.25), (1, 0.25), (2, 0.75), (3, 0.75), (4, 0.75), (5, 0.75)]


def test_a_resume_right_after_the_torn_line_and_a_new_run_over_an_old_one(tmp_path):
    run(tmp_path, [1, 2], reward=0.25)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3')
    run(tmp_path, [3], reward=0.5)
    assert rewards_by_step(tmp_path) == [(1, 0.25), (2, 0.25), (3, 0.5)]
    run(tmp_path, [0, 1], reward=0.75)
    assert rewards_by_step(tmp_path) == [(0, 0.75), (1, 0.75)]


def test_steps_must_ascend_from_the_first(tmp_path):
    with Recorder(QUIET, tmp_path, num_steps=5, first_step=2, resolved_config=None) as recorder:
        with pytest.raises(ValueError, match="step 1 was logged after step 1"):
            recorder.log(1, {})
        recorder.log(2, {})
        with pytest.raises(ValueError, match="step 2 was logged after step 2"):
            recorder.log(2, {})


@pytest.mark.parametrize("line", ["not json", "[1]", '{"rewards/mean": 1.0}', '{"step": 1}'])
def test_a_damaged_line_is_named_and_nothing_is_deleted(tmp_path, line):
    text = f'{{"step": 0}}\n{{"step": 1}}\n{line}\n{{"step": 2}}\n'
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: .*repair the line or move the file away"):
        run(tmp_path, [2], reward=1.0)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_run_facts_hold_the_settings_and_every_start_that_counts(tmp_path):
    run(tmp_path, [1, 2, 3], reward=0.0, resolved_config={"trainer": {"num_steps": 5}})
    run(tmp_path, [3, 4], reward=0.0)
    run(tmp_path, [2, 3], reward=0.0, resolved_config={"trainer": {"num_steps": 6}})
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["num_steps"] == 5 and facts["config"] == {"trainer": {"num_steps": 6}}
    assert [start["first_step"] for start in facts["starts"]] == [1, 2]  # the start at 3 was discarded together with its steps
    assert facts["starts"][0]["versions"]["megatron-core"].startswith("0.19.")


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    config = TelemetryConfig(progress=False)
    run(tmp_path, [1, 2, 3], reward=0.25, config=config, resolved_config={"seed": 7})
    run(tmp_path, [3, 4], reward=0.5, config=config)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("rewards/mean")] == [(1, 0.25), (2, 0.25), (3, 0.5), (4, 0.5)]
    assert events.Tensors("config/text_summary")[0].tensor_proto.string_val == [b"    seed: 7"]


@pytest.mark.parametrize(("package", "setting"), [("wandb", "wandb_project"), ("mlflow", "mlflow_tracking_uri")])
def test_a_missing_service_is_named_before_anything_is_discarded(tmp_path, monkeypatch, package, setting):
    run(tmp_path, [1], reward=0.25)
    monkeypatch.setitem(sys.modules, package, None)  # makes its import fail
    with pytest.raises(UserError, match=f"telemetry.{setting} is set, but .*pip install {package}"):
        run(tmp_path, [1], reward=0.5, config=TelemetryConfig(progress=False, tensorboard=False, **{setting: "x"}))
    assert rewards_by_step(tmp_path) == [(1, 0.25)]


class Calls(list):
    """Stands in for a module or an object: notes the calls that are made on it, and gives itself."""

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.append((name, args, kwargs))
            return self

        return call


def test_wandb_gets_one_run_per_start_and_its_outcome(tmp_path, monkeypatch):
    """The calls of W&B's public API, in order; 0.31.0 itself accepts them (tried by hand, offline)."""
    wandb = Calls()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = TelemetryConfig(progress=False, tensorboard=False, wandb_project="project")
    with pytest.raises(RuntimeError), Recorder(config, tmp_path / "run", num_steps=5, first_step=3, resolved_config={"a": 1}) as recorder:
        recorder.log(3, {"x": 0.5})
        raise RuntimeError
    assert wandb == [
        ("init", (), {"project": "project", "name": "run from step 3", "group": "run", "dir": str(tmp_path / "run"), "config": {"a": 1}}),
        ("log", ({"x": 0.5},), {"step": 3}),
        ("finish", (), {"exit_code": 1}),
    ]


def test_mlflow_gets_flat_parameters_and_metrics_in_the_background(tmp_path, monkeypatch):
    """The calls of MLflow's public API, in order; 3.17.2 itself accepts them (tried by hand, SQLite store)."""
    mlflow = Calls()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = TelemetryConfig(progress=False, tensorboard=False, mlflow_tracking_uri="sqlite:///x")
    resolved_config = {"model": {"path": "m", "options": {}}, "seed": 1}
    run(tmp_path / "run", [0], reward=0.5, config=config, resolved_config=resolved_config)
    assert mlflow == [
        ("set_tracking_uri", ("sqlite:///x",), {}),
        ("start_run", (), {"run_name": "run", "tags": {"output_dir": str(tmp_path / "run")}}),
        ("log_params", ({"model.path": "m", "model.options": {}, "seed": 1},), {}),
        ("log_metrics", ({"rewards/mean": 0.5},), {"step": 0, "synchronous": False}),
        ("flush_async_logging", (), {}),
        ("end_run", ("FINISHED",), {}),
    ]


def test_a_full_disk_is_a_user_error_with_the_step(tmp_path, monkeypatch):
    def no_space(self, step, values):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(JsonLines, "write", no_space)
    with pytest.raises(UserError, match="cannot record the metrics of step 1 in .*No space left on device; free some space"):
        run(tmp_path, [1], reward=0.5)


def test_an_output_directory_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot record metrics in trainer\.output_dir=.*file/run"):
        run(tmp_path / "file" / "run", [1], reward=0.5)
