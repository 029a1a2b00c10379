"""The report tells the run's numbers, needs no other file, and can be drawn from any run."""

import base64
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from otb_megatron.config import TelemetryConfig
from otb_megatron.telemetry import report as report_module
from otb_megatron.telemetry.columns import METRIC_COLUMNS, PHASE_COLUMNS
from otb_megatron.telemetry.plots import bar_means, running_mean, vertical_range
from otb_megatron.telemetry.recorder import Recorder
from otb_megatron.telemetry.report import QUANTITIES, write_report
from otb_megatron.types import UserError


def record(output_dir, rows, *, num_steps=120, resolved_config=None):
    config = TelemetryConfig(progress=False, tensorboard=False)
    with Recorder(config, output_dir, num_steps=num_steps, first_step=min(rows), resolved_config=resolved_config) as recorder:
        for step, values in rows.items():
            recorder.log(step, values)


def write_and_read(output_dir) -> str:
    assert write_report(output_dir) == output_dir / "report.html"
    return (output_dir / "report.html").read_text()


def picture_sizes(page) -> dict[str, tuple[int, int]]:
    """Title -> width and height, read from the PNG headers."""
    found = {}
    for title, encoded in re.findall(r'<h2>([^<]+)</h2><img src="data:image/png;base64,([^"]+)"', page):
        png = base64.b64decode(encoded, validate=True)
        assert png.startswith(b"\x89PNG\r\n\x1a\n") and png.endswith(b"IEND\xaeB`\x82")
        found[title] = struct.unpack(">II", png[16:24])
    return found


def table(page) -> dict[str, list[str]]:
    """Row name -> its cells as text."""
    rows = re.findall(r"<tr><th>([^<]+)</th>(.*?)</tr>", page)
    return {name: [re.sub("<[^>]+>", "", cell).strip() for cell in re.findall(r"<td>(.*?)</td>", cells)] for name, cells in rows}


def test_a_run_of_reinforcement_learning(tmp_path):
    """Best reward at step 2; accuracy at steps 0 and 3; the loss is left out beside a reward; the wall time is 2 + 3 + 4 s."""
    rows = {0: {"eval/accuracy": 0.4}}
    for step, reward in ((1, 0.5), (2, 0.75), (3, 0.625)):
        rows[step] = {"rewards/mean": reward, "loss/total": 1.0, "policy/entropy": 1.0 / step, "time/step": step + 1.0, "time/update": 1.0}
    rows[3]["eval/accuracy"] = 0.875
    record(tmp_path / "quick & start", rows, resolved_config={"model": {"path": "</pre><script>"}})
    page = write_and_read(tmp_path / "quick & start")

    assert "<title>quick &amp; start</title>" in page
    assert "3 of 120 steps · reward 0.5 → 0.625 · held-out accuracy 0.4 → 0.875" in page
    assert list(picture_sizes(page)) == ["Reward and held-out accuracy", "Policy entropy", "Time per phase"]
    assert picture_sizes(page) == {"Reward and held-out accuracy": (1024, 480), "Policy entropy": (1024, 480), "Time per phase": (2080, 480)}
    cells = table(page)
    assert cells["reward"] == ["0.5 step 1", "0.625 step 3", "0.75 step 2"]
    assert cells["held-out accuracy"] == ["0.4 step 0", "0.875 step 3", "0.875 step 3"]
    assert cells["entropy"] == ["1 step 1", "0.3333 step 3", "&ndash;"]
    assert cells["wall time in steps"] == ["9.0 s"]
    assert "loss" not in cells
    assert "megatron-core 0.19." in cells["versions"][0]
    assert "&lt;/pre&gt;&lt;script&gt;" in page and "<script>" not in page


def test_the_page_needs_no_other_file(tmp_path):
    record(tmp_path, {1: {"rewards/mean": 1.0}})
    page = write_and_read(tmp_path)
    assert not re.search(r"https?:|<link|@import|url\(", re.sub(r"base64,[^\"]+", "", page))


def test_fine_tuning_shows_the_loss_and_its_lowest(tmp_path):
    record(tmp_path, {step: {"loss/total": loss} for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0))})
    page = write_and_read(tmp_path)
    assert list(picture_sizes(page)) == ["Loss"]
    assert table(page)["loss"] == ["3 step 1", "2 step 3", "1 step 2"]


def test_rewards_on_another_scale_than_accuracy_get_their_own_picture(tmp_path):
    record(tmp_path, {step: {"rewards/mean": 5.0 * step, "eval/accuracy": 0.5} for step in (1, 2)})
    assert list(picture_sizes(write_and_read(tmp_path))) == ["Reward", "Held-out accuracy"]


def test_what_is_not_finite_is_said(tmp_path):
    gradient = {1: 1.0, 2: math.nan, 3: math.inf, 4: 1.0}
    record(tmp_path, {step: {"optimizer/grad_norm": norm, "policy/energy": math.nan} for step, norm in gradient.items()})
    page = write_and_read(tmp_path)
    assert "gradient norm: not a finite number at step 2 and 1 more" in page
    assert list(picture_sizes(page)) == ["Gradient norm"]
    assert table(page)["energy"][0] == "nan step 1"


@pytest.mark.parametrize("num_steps", [1, 120, 5000])
def test_any_length_can_be_drawn(tmp_path, num_steps):
    """Among them one spike, which turns the axis logarithmic."""
    keys = ["optimizer/grad_norm", "time/step", "time/update"]
    record(tmp_path, {step: dict.fromkeys(keys, 1e6 if step == 77 else 0.5) for step in range(1, num_steps + 1)})
    assert list(picture_sizes(write_and_read(tmp_path))) == ["Gradient norm", "Time per phase"]


def test_the_stack_adds_up_to_the_step(tmp_path, monkeypatch):
    """Step 0 has no total; at step 1 the total of 10 s holds 1 + 2 s of phases and 7 s of something else; at step 2 phases overshoot by rounding."""
    drawn = {}
    monkeypatch.setattr(report_module, "draw_stack", lambda phases, steps: drawn.update(phases=phases, steps=steps) or b"")
    record(
        tmp_path,
        {
            0: {"time/evaluation": 4.0},
            1: {"time/update": 2.0, "time/rollout": 1.0, "time/step": 10.0},
            2: {"time/update": 2.5, "time/rollout": 1.0, "time/step": 3.4999},
        },
    )
    write_report(tmp_path)
    assert drawn["steps"].tolist() == [0, 1, 2]
    assert {name: seconds.tolist() for name, seconds in drawn["phases"].items()} == {
        "rollout": [0.0, 1.0, 1.0],
        "update": [0.0, 2.0, 2.5],
        "evaluation": [4.0, 0.0, 0.0],
        "other": [0.0, 7.0, 0.0],
    }
    assert list(drawn["phases"])[-1] == "other"


def test_a_directory_without_a_run_or_a_step_is_named(tmp_path):
    with pytest.raises(UserError, match=r"has no metrics\.jsonl and no run\.json; name the trainer\.output_dir of a run"):
        write_report(tmp_path)
    with Recorder(TelemetryConfig(progress=False, tensorboard=False), tmp_path, num_steps=1, first_step=1, resolved_config=None):
        pass
    with pytest.raises(UserError, match=r"metrics\.jsonl holds no step yet"):
        write_report(tmp_path)


def test_running_mean_against_a_loop():
    values = np.random.default_rng(0).normal(size=23)
    values[[3, 4, 5, 11]] = np.nan
    expected = [np.nanmean(values[max(0, i - 2) : i + 3]) for i in range(23)]
    np.testing.assert_allclose(running_mean(values, 5), expected, rtol=1e-12)
    assert np.isnan(running_mean(np.array([np.nan] * 7 + [1.0]), 5)).tolist() == [True] * 5 + [False] * 3


def test_bars_are_means_of_their_steps():
    left, right, means = bar_means(np.array([1, 2, 3, 4, 5]), np.array([1.0, 3.0, 5.0, 9.0, 2.0]), 2)
    assert (left.tolist(), right.tolist(), means.tolist()) == ([1, 3, 5], [2, 4, 5], [2.0, 7.0, 2.0])


@pytest.mark.parametrize(("lowest", "highest", "limits"), [(0.0, 1.0, (-0.05, 1.05)), (0.0, 0.0, (-0.5, 0.5)), (-1.0, -1.0, (-1.05, -0.95))])
def test_vertical_range(lowest, highest, limits):
    assert vertical_range(lowest, highest) == pytest.approx(limits)


def test_every_name_that_is_shown_is_documented():
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    shown = {column.key for column in (*METRIC_COLUMNS, *PHASE_COLUMNS)} | {quantity.key for quantity in QUANTITIES}
    assert [name for name in sorted(shown) if f"`{name}`" not in documented] == []
