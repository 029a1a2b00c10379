"""The quickstart's task: held-out problems are new, demonstrations make the mistake they are said to make, prompts are short, and a seed is a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from otb_megatron.config import SourceConfig
from otb_megatron.data.sources import demonstration_tokens, load_prompts
from otb_megatron.weights.architectures import load_model
from tools.quickstart_assets import FORGOTTEN_CARRIES, NUM_PUPILS, NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS, Assets, make_assets


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return make_assets(tmp_path_factory.mktemp("assets"), seed=3)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _question(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"]


def test_held_out_problems_are_not_in_the_training_data(assets: Assets) -> None:
    train, validation, demonstrations = ({_question(row) for row in _rows(path)} for path in (assets.train, assets.validation, assets.demonstrations))
    assert (len(train), len(validation)) == (NUM_TRAIN_ROWS, NUM_VALIDATION_ROWS)
    assert not train & validation and demonstrations == train


def test_demonstrations_forget_the_carry_as_often_as_they_should(assets: Assets) -> None:
    rows = _rows(assets.demonstrations)
    assert len(rows) == NUM_PUPILS * NUM_TRAIN_ROWS
    carries = forgotten = 0
    for row in rows:
        first, _, second = _question(row).split(": ")[1].removesuffix(" =").split(" ")
        truth, answer = int(row["reward_model"]["ground_truth"]), int(row["response"])
        assert truth == int(first) + int(second)
        carry = int(first[-1]) + int(second[-1]) >= 10
        assert answer == truth or (carry and answer == truth - 10)
        carries += carry
        forgotten += answer != truth
    # 45 of the 100 pairs of last digits carry. With 30,000 rows the shares are within 0.02 of what is drawn.
    assert carries / len(rows) == pytest.approx(0.45, abs=0.02)
    assert forgotten / carries == pytest.approx(FORGOTTEN_CARRIES, abs=0.02)


def test_prompts_and_answers_have_the_expected_tokens(assets: Assets) -> None:
    """A prompt is 12 tokens: the constant wording is merged, digits never are."""
    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    prompts = load_prompts(SourceConfig(path=assets.demonstrations, num_rows=50), tokenizer, max_prompt_tokens=24, overlong="reject").prompts
    for prompt in prompts:
        assert len(prompt.token_ids) == 12
        tokens = demonstration_tokens(tokenizer, prompt)
        assert tokens[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert [tokenizer.decode([token]) for token in tokens[:-1]] == list(prompt.demonstration or "")
        assert tokenizer.decode(tokens, skip_special_tokens=True) == prompt.demonstration
    messages = prompts[0].messages[0]["content"]
    assert tokenizer.decode(prompts[0].token_ids) == f"<|im_start|>user\n{messages}<|im_end|>\n<|im_start|>assistant\n"


def test_model_is_one_that_this_project_trains(assets: Assets) -> None:
    model = load_model(assets.model)
    assert model.tied and model.vocab_size == len(AutoTokenizer.from_pretrained(assets.model))


def test_same_seed_same_files(assets: Assets, tmp_path: Path) -> None:
    again = make_assets(tmp_path / "again", seed=3)
    for name in ("model", "train", "validation", "demonstrations"):
        first, second = getattr(assets, name), getattr(again, name)
        pairs = zip(sorted(first.iterdir()), sorted(second.iterdir()), strict=True) if first.is_dir() else [(first, second)]
        assert all(a.read_bytes() == b.read_bytes() for a, b in pairs)
    other = make_assets(tmp_path / "other", seed=4)
    assert other.train.read_bytes() != assets.train.read_bytes()
