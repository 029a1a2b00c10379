"""The real Megatron-Bridge: what it says about families with a table here, and a family without one through everything.

Run by `make test-bridge`, which installs it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from otb_megatron.mcore.bridge import find_bridge
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import ARCHITECTURES, load_model
from otb_megatron.weights.files import Checkpoint
from tests.architectures.test_rollout import check_answers
from tests.bridge.stand_in import import_megatron_bridge
from tests.distributed.parity import Statistics, check, statistics_and_export
from tests.distributed.training import record_samples
from tests.models import CONFIGS, HY_V3, VOCAB_SIZE, make_tokenizer, random_model

pytestmark = pytest.mark.timeout(900)  # importing Megatron-Bridge takes a rank a quarter of a minute of its own


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_megatron_bridge()


@pytest.fixture(scope="module")
def hy_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model `hy_v3_moe` and samples to compare on."""
    work = tmp_path_factory.mktemp("models")
    random_model(HY_V3).save_pretrained(work / "hy_v3_moe")
    make_tokenizer().save_pretrained(work / "hy_v3_moe")
    record_samples(work / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)
    return work


def _write_config(directory: Path, kind: str) -> str:
    """Writes the config.json of a tiny model and returns its model_type."""
    config = CONFIGS[kind]
    stored = config.to_dict() | {"architectures": [type(random_model(config)).__name__]}
    directory.joinpath("config.json").write_text(json.dumps(stored))
    return config.model_type


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen3_tied", "qwen3_moe", "qwen3_moe_unnormalised"])
def test_it_describes_a_family_as_our_table_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model_type = _write_config(tmp_path, kind)
    ours = load_model(tmp_path)
    monkeypatch.delitem(ARCHITECTURES, model_type)
    theirs = load_model(tmp_path, find_bridge=find_bridge)
    assert theirs.settings == ours.settings
    assert theirs.rules(104) == ours.rules(104)


@pytest.mark.parametrize(
    ("kind", "faults"),
    [
        ("llama", ["LlamaBridge", "its maybe_modify_converted_hf_weight() changes weights"]),
        ("mistral", ["builds its model with MistralModelProvider"]),
        ("glm4_moe", ["rotary_percent=0.5 has no mapping"]),
        ("deepseek_v3_moe", ["builds its model with MLAModelProvider", "its maybe_modify_loaded_hf_weight()"]),
    ],
)
def test_what_it_describes_otherwise_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, faults: list[str]) -> None:
    monkeypatch.delitem(ARCHITECTURES, _write_config(tmp_path, kind))
    with pytest.raises(UserError) as caught:
        load_model(tmp_path, find_bridge=find_bridge)
    assert [fault for fault in faults if fault not in str(caught.value)] == []


def test_every_tensor_of_a_family_without_a_table_has_one_rule(hy_v3: Path) -> None:
    names = [name for rule in load_model(hy_v3 / "hy_v3_moe", find_bridge=find_bridge).rules(104) for name in rule.hf]
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(hy_v3 / "hy_v3_moe").names


@pytest.mark.parametrize("layout", ["one", "tp2_sp", "pp2", "ep2"])
def test_a_family_without_a_table_computes_as_transformers_and_comes_out_as_it_went_in(hy_v3: Path, tmp_path: Path, layout: str) -> None:
    check(hy_v3, tmp_path / "export", "hy_v3_moe", layout, on_rank=_on_rank, timeout_s=600)


def _on_rank(rank: int, world_size: int, values: dict[str, Any], export_dir: Path) -> Statistics | None:
    import_megatron_bridge()
    return statistics_and_export(rank, world_size, values, export_dir, find_bridge)


def test_vllm_answers_as_transformers_after_each_update(tmp_path: Path) -> None:
    check_answers(tmp_path, HY_V3)


def test_a_family_that_it_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(UserError, match="Megatron-Bridge does not know GPT2LMHeadModel either"):
        load_model(tmp_path, find_bridge=find_bridge)
