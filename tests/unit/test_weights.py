"""Layout operations invert each other; every tensor of a checkpoint has a rule; unknown settings are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForTokenClassification

from otb_megatron.types import UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint, write_checkpoint
from otb_megatron.weights.layout import GatedPair, GroupedQKV, PaddedVocabulary, Whole
from tests.models import CONFIGS, make_model


def test_grouped_qkv_by_hand() -> None:
    """4 heads, 2 groups, head_dim 1: each group's two queries, then its key, then its value."""
    layout = GroupedQKV(num_groups=2, head_dim=1)
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert layout.to_megatron([q, k, v]).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_gated_shards_by_hand() -> None:
    """Rank 0 of 2 holds the first half of gate above the first half of up."""
    full = GatedPair().to_megatron([torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]])
    assert GatedPair().shard(full, 2, 0).flatten().tolist() == [0, 1, 10, 11]
    assert GatedPair().shard(full, 2, 1).flatten().tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Whole(), [(6,)]),
        (Whole(dim=1), [(5, 8)]),
        (GatedPair(), [(12, 5), (12, 5)]),
        (GroupedQKV(num_groups=4, head_dim=3), [(24, 5), (12, 5), (12, 5)]),
        (GroupedQKV(num_groups=4, head_dim=3), [(24,), (12,), (12,)]),
        (PaddedVocabulary(vocab_size=97, padded_vocab_size=104), [(97, 5)]),
    ],
)
def test_round_trip_is_bit_exact(layout: Whole, shapes: list[tuple[int, ...]], size: int) -> None:
    parts = [torch.randn(shape) for shape in shapes]
    full = layout.to_megatron(parts)
    shards = [layout.shard(full, size, rank) for rank in range(size)]
    assert torch.equal(layout.unshard(shards), full)
    for part, back in zip(parts, layout.to_hf(layout.unshard(shards)), strict=True):
        assert torch.equal(part, back)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_of_a_token_classifier_has_one_rule(tmp_path: Path, kind: str) -> None:
    """A critic as transformers saves it: the decoder under the same names, `score` instead of an output layer."""
    config = copy.deepcopy(CONFIGS[kind])
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    names = [name for rule in load_model(tmp_path).critic_rules(104) for name in rule.hf]
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(tmp_path).names


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_of_a_checkpoint_has_one_rule(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path, kind)
    names = [name for rule in load_model(tmp_path).rules(104) for name in rule.hf]
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(tmp_path).names


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' has no weight mapping"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "RoPE scaling"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "RoPE scaling"),
        ({"surprising_new_field": 3}, "surprising_new_field=3"),
    ],
)
def test_a_setting_without_a_mapping_is_refused(tmp_path: Path, change: dict, part: str) -> None:
    config = CONFIGS["qwen3"].to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=part.replace("[", r"\[")):
        model = load_model(tmp_path)
        model.architecture.settings(model.config)


def test_a_published_qwen2_configuration_is_understood(tmp_path: Path) -> None:
    """config.json of Qwen2.5-0.5B as its authors published it: a window size that is turned off, and fields of their own."""
    published = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    model = load_model(tmp_path)
    settings = model.architecture.settings(model.config)
    assert (settings["kv_channels"], settings["rotary_base"], settings["add_qkv_bias"], model.tied) == (64, 1e6, True, True)


def test_export_is_sharded_and_complete(tmp_path: Path) -> None:
    original = make_model(tmp_path / "model", "qwen3").state_dict()
    write_checkpoint(tmp_path / "out", iter(original.items()), source=tmp_path / "model", dtype=torch.float32, max_shard_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    exported = Checkpoint(tmp_path / "out")
    assert exported.names == original.keys()
    assert all(torch.equal(exported.get(name), tensor) for name, tensor in original.items())
    assert (tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out.partial").exists()


def test_a_failing_export_leaves_the_old_one(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3")
    make_model(tmp_path / "out", "qwen3", seed=1)
    (tmp_path / "out" / "mine").write_text("kept")

    def fails():
        yield "a", torch.zeros(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        write_checkpoint(tmp_path / "out", fails(), source=tmp_path / "model", dtype=torch.float32)
    assert (tmp_path / "out" / "mine").read_text() == "kept" and not (tmp_path / "out.partial").exists()


def test_an_export_replaces_nothing_but_an_export(tmp_path: Path) -> None:
    original = make_model(tmp_path / "model", "qwen3").state_dict()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("years")
    for directory, part in ((tmp_path / "work", "not an earlier export"), (tmp_path / "model", "must not replace the model")):
        with pytest.raises(UserError, match=part):
            write_checkpoint(directory, iter(original.items()), source=tmp_path / "model", dtype=torch.float32)
    assert (tmp_path / "work" / "thesis.tex").read_text() == "years"


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        Checkpoint(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}))
    with pytest.raises(UserError, match="gone.safetensors"):
        Checkpoint(tmp_path)
