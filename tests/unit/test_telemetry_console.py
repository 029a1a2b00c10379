"""The line per step: aligned, inside the terminal, complete in a log file."""

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from otb_megatron.telemetry.columns import StepLine, number, seconds
from otb_megatron.telemetry.console import Countdown, StepConsole, summary_table

STEP = {
    "rewards/mean": 0.53125,
    "loss/total": 1e-4,
    "response/length": 3.25,
    "policy/entropy": 0.75,
    "optimizer/grad_norm": 12.345,
    "policy/energy": 0.004,
    "policy/log_prob": -1.0,
    "time/rollout": 1.25,
    "time/reward": 0.05,
    "time/statistics": 0.5,
    "time/advantages": 0.001,
    "time/update": 12.0,
    "time/weights": 0.1,
    "time/step": 14.0,
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def printed(steps, *, width=100, terminal=False, num_steps=120, seconds_between=10.0, first_step=0):
    """What `StepConsole` writes for (step, values) pairs."""
    clock, output = Clock(), io.StringIO()
    console = StepConsole(
        num_steps=num_steps, first_step=first_step, console=Console(file=output, width=width, force_terminal=terminal, highlight=False), clock=clock
    )
    for step, values in steps:
        clock.now += seconds_between
        console.write(step, values)
    console.close(failed=False)
    return output.getvalue()


def test_a_log_file_gets_whole_plain_lines_with_the_times():
    """Ten seconds a step: after step 2 the pace is known and 118 steps remain, 1180 s."""
    before = {"eval/accuracy": 0.4, "eval/num_prompts": 9.0, "time/eval": 1.0}
    text = printed([(0, before), (1, STEP), (2, STEP | {"eval/accuracy": 0.5, "time/checkpoint": 3.0})], width=80)
    assert text.splitlines() == [
        "  0/120  held-out accuracy 0.400  elapsed 0:00:10  remaining -:--:--",
        "   step  reward  held-out  length  entropy  grad norm  energy |  rollout  reward  stats   adv  update  weights  s/step",
        "  1/120   0.531             3.250    0.750     12.345  4.0e-3 |     1.25    0.05   0.50  0.00    12.0     0.10    14.0"
        "  elapsed 0:00:20  remaining 0:19:50",
        "  2/120   0.531     0.500   3.250    0.750     12.345  4.0e-3 |     1.25    0.05   0.50  0.00    12.0     0.10    14.0"
        "  checkpoint 3.00 s  elapsed 0:00:30  remaining 0:19:40",
    ]


def test_fine_tuning_shows_loss_and_tokens():
    line = StepLine(40, {"loss/total": 2.5, "data/tokens": 123456.0, "optimizer/grad_norm": 1.0, "time/step": 0.25}, frozenset(), 80)
    assert line.header() == " step    loss  tokens  grad norm |  s/step"
    assert line.row(7, {"loss/total": 2.5, "data/tokens": 123456.0, "optimizer/grad_norm": 1.0, "time/step": 0.25}) == (
        " 7/40   2.500    123k      1.000 |    0.25"
    )


@pytest.mark.parametrize("width", range(80, 201))
def test_lines_fit_every_width_and_numbers_end_under_their_labels(width):
    values = STEP | {"time/evaluation": 2.0}
    line = StepLine(5000, values, frozenset({"eval/accuracy"}), width)
    header, row = line.header(), line.row(5000, values | {"eval/accuracy": 0.875, "time/checkpoint": 3.0})
    assert max(len(header), len(row)) <= width
    ends = [match.end() for match in re.finditer(r"\S+(?: norm)?", header)]
    numbers = [match.end() for match in re.finditer(r"\S+", row)]
    assert numbers[: len(ends)] == ends  # what follows is a note without a label
    assert len(ends) >= 1 + 6 + 1 + 4 + 1  # step, six metrics, the bar, four phases at least, the total


def test_the_longest_phases_stay_where_not_all_fit():
    header = StepLine(120, STEP, frozenset({"eval/accuracy"}), 80).header()
    assert header == "   step    rew  eval   len   entr   grad   enrg | roll rewd stat updt wght s/st"


def test_accuracy_measured_late_is_shown_on_the_line_or_below_it():
    line = StepLine(120, STEP, frozenset(), 100)
    assert line.row(9, STEP | {"eval/accuracy": 0.5}).endswith(" 14.0\n         held-out 0.500")
    assert StepLine(120, STEP, frozenset(), 200).row(9, STEP | {"eval/accuracy": 0.5}).endswith(" 14.0  held-out 0.500")


def test_a_terminal_gets_one_header_and_a_bar_that_ends_complete():
    text = printed([(step, STEP) for step in range(1, 4)], terminal=True, num_steps=3, first_step=1)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert plain.count("grad norm") == 1
    assert "step 3/3" in plain and "100%" in plain and "elapsed 0:00:30  remaining 0:00:00" in plain


def test_a_resumed_run_starts_its_bar_where_it_was_and_estimates_from_its_own_pace():
    text = printed([(51, STEP), (52, STEP)], terminal=True, num_steps=100, first_step=51)
    assert "step 50/100" in text
    assert "remaining 0:08:00" in text  # 48 steps of 10 s


def test_the_summary_keeps_long_paths_whole():
    output = io.StringIO()
    path = "/" + "long/" * 30 + "report.html"
    summary_table([("accuracy", 0.87654), ("steps", 120), ("report", path)], Console(file=output, width=80))
    assert output.getvalue().splitlines() == ["", "accuracy  0.8765", "steps     120", f"report    {path}"]


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 6, "0.000"),
        (-0.5, 6, "-0.500"),
        (0.0123, 5, "0.012"),
        (0.00456, 6, "4.6e-3"),
        (1.2e-10, 5, "1e-10"),
        (1234.5678, 5, "1235"),
        (99999.7, 5, "100k"),
        (-123456.0, 6, "-123k"),
        (3.21e9, 6, "3.21G"),
        (1e20, 6, "1.0e20"),
        (float("nan"), 6, "nan"),
        (float("-inf"), 6, "-inf"),
    ],
)
def test_numbers(value, width, text):
    assert number(value, width) == text


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(5, 9))
def test_numbers_keep_their_width_and_are_near_the_value(value, width):
    """float32 values have exponents of two digits at most, so the worst is "-1e-45", 6 characters."""
    text = number(value, width)
    assert len(text) <= max(width, 6)
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    shown = float(text.rstrip("kMGT")) * factor
    assert abs(shown - value) <= 0.5 * abs(value)


@pytest.mark.parametrize(("value", "text"), [(0.004, "0.00"), (9.996, "10.0"), (99.96, "100"), (9999.4, "9999"), (18000.0, "5.0h")])
def test_seconds(value, text):
    assert seconds(value, 4) == text


def test_countdown_leaves_warming_up_out_of_the_pace(capsys):
    """The first of 10 takes 100 s; then one takes 2 s. Lines come at least 11 s apart, and at the end; what remains goes at 2 s each."""
    clock = Clock()
    countdown = Countdown("tokens", 10, interval_s=11.0, clock=clock)
    clock.now = 100.0
    for done in range(1, 11):
        countdown.update(done)
        clock.now += 2.0
    assert capsys.readouterr().out.splitlines() == [
        "2/10 tokens  elapsed 0:01:42  remaining 0:00:16",
        "8/10 tokens  elapsed 0:01:54  remaining 0:00:04",
        "10/10 tokens  elapsed 0:01:58  remaining 0:00:00",
    ]
