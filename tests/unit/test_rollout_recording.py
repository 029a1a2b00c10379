"""Samples written to disk come back equal, number by number; anything else is refused with the file's name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from otb_megatron.types import Prompt, Response, RoutedExperts, Sample, UserError

PROMPT = Prompt(
    id=7,
    data_source="chain_sum",
    messages=({"role": "system", "content": "Rechne."}, {"role": "user", "content": "1\u2028+\n2 = \U0001f642?"}),
    token_ids=(5, 6, 7),
    ground_truth={"answer": "3", "parts": [1, 2.5, None]},
    extra_info={"split": "train", "index": 7},
    demonstration="3",
)
EXPERTS = RoutedExperts.of(np.arange(4 * 3 * 2, dtype=np.uint16).reshape(4, 3, 2) * 2700)  # up to 62100, above any signed 16-bit number
SAMPLES = [
    Sample(PROMPT, Response((8, 9, 1), (-0.125, float(np.float32(-1e-38)), -87.0), "34", "stop", 12), group=0, reward=1.0),
    Sample(PROMPT, Response((8,), (-2.0,), "\ud83d", "length", 12), group=0, reward=-0.1),
    Sample(Prompt(9, "x", (), (4,), "a"), Response((1,), (), "", "abort", 11), group=1, reward=0.0),
    Sample(PROMPT, Response((8, 1), (-2.0, -1.0), "", "stop", 12, EXPERTS), group=0, reward=0.0),
]


def test_round_trip(tmp_path: Path):
    """All fields, line separators inside a text, a lone surrogate, empty log-probs, routed experts; each prompt is one object again."""
    path = save_rollouts(tmp_path / "rollouts", 3, SAMPLES)
    loaded = load_rollouts(tmp_path / "rollouts", 3)
    assert path == tmp_path / "rollouts" / "step-000003.jsonl"
    assert loaded == SAMPLES
    assert loaded[0].prompt is loaded[1].prompt
    assert os.listdir(tmp_path / "rollouts") == ["step-000003.jsonl"]


@given(st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=30))
def test_log_probs_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]):
    directory = tmp_path_factory.mktemp("recording")
    save_rollouts(directory, 0, [Sample(PROMPT, Response((1,) * len(values), tuple(values), "", "stop", 0), 0, 0.0)])
    assert np.array(load_rollouts(directory, 0)[0].response.log_probs, np.float32).tobytes() == np.array(values, np.float32).tobytes()


def test_a_step_is_replaced_whole(tmp_path: Path):
    save_rollouts(tmp_path, 0, SAMPLES)
    save_rollouts(tmp_path, 0, SAMPLES[:1])
    assert load_rollouts(tmp_path, 0) == SAMPLES[:1]


def test_a_missing_step_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"step-000004.jsonl does not exist; it is written by a run with rollout.save=true"):
        load_rollouts(tmp_path, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "".join(text.splitlines(keepends=True)[:-1]), "announces 4 samples of step 0 and holds 3"),
        (lambda text: text[:-20], "no recording of samples: JSONDecodeError"),
        (lambda text: "", "no recording of samples: ValueError"),
        (lambda text: text.replace('"num_samples"', '"samples"'), "no recording of samples: KeyError: 'num_samples'"),
        (lambda text: text.replace('"prompt": 1', '"prompt": 5'), "no recording of samples: IndexError"),
        (lambda text: text.replace('"group": 1', '"grp": 1'), "no recording of samples: KeyError: 'group'"),
        (lambda text: text.replace("[-0.125, ", "["), "a response of 3 tokens came with 2 log-probs"),
        (lambda text: text.replace('"step": 0', '"step": 1'), "samples of step 1 and holds 4 of step 0"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage, message: str):
    path = save_rollouts(tmp_path, 0, SAMPLES)
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=message):
        load_rollouts(tmp_path, 0)


def test_what_json_cannot_hold_is_refused_and_leaves_nothing(tmp_path: Path):
    with pytest.raises(UserError, match="rollout.save cannot write the samples of step 0: Object of type complex"):
        save_rollouts(tmp_path, 0, [Sample(Prompt(1, "x", (), (4,), 1j), Response((1,), (-1.0,), "", "stop", 0), 0, 0.0)])
    assert list(tmp_path.iterdir()) == []
