"""Layout operations invert each other; every tensor of a checkpoint has a rule; unknown settings are refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForTokenClassification

from otb_megatron.types import UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.export import Export
from otb_megatron.weights.files import INDEX, Checkpoint
from otb_megatron.weights.layout import GatedPair, GroupedQKV, InterleavedPair, PaddedVocabulary, Transposed, Whole
from otb_megatron.weights.rules import Rule, Stack
from tests.models import CONFIGS, make_model


def test_grouped_qkv_by_hand() -> None:
    """4 heads, 2 groups, head_dim 1: each group's two queries, then its key, then its value."""
    layout = GroupedQKV(num_groups=2, head_dim=1)
    q, k, v = torch.tensor([[0.0], [1], [2], [3]]), torch.tensor([[10.0], [11]]), torch.tensor([[20.0], [21]])
    assert layout.to_megatron([q, k, v]).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def shard(layout: Whole, parts: list[torch.Tensor], size: int, rank: int) -> torch.Tensor:
    """The shard of a rank from its spans of the parts alone."""
    dim = layout.dim
    if dim is not None:
        index = [(*[slice(None)] * dim, layout.span(part.shape[dim], size, rank)) for part in parts]
        parts = [part[span] for part, span in zip(parts, index, strict=True)]
    return layout.share(size, rank).to_megatron(parts)


def test_gated_shards_by_hand() -> None:
    """Rank 0 of 2 holds the first half of gate above the first half of up."""
    parts = [torch.arange(4.0)[:, None], torch.arange(10.0, 14.0)[:, None]]
    assert shard(GatedPair(), parts, 2, 0).flatten().tolist() == [0, 1, 10, 11]
    assert shard(GatedPair(), parts, 2, 1).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_shards_by_hand() -> None:
    """5 rows padded to 8: rank 2 of 4 holds the last row and a row of zeros, rank 3 only zeros."""
    layout, rows = PaddedVocabulary(vocab_size=5, padded_vocab_size=8), [torch.arange(1.0, 6.0)[:, None]]
    assert [shard(layout, rows, 4, rank).flatten().tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]


def test_an_uneven_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="6 cannot be cut into 4 equal shards"):
        Whole(dim=0).span(6, 4, 1)


def test_interleaved_pair_by_hand() -> None:
    """Two inputs, two channels: columns gate 0, up 0, gate 1, up 1 become rows gate 0, gate 1, up 0, up 1; of a bias as well."""
    layout = InterleavedPair()
    assert layout.to_megatron([torch.tensor([[0.0, 10, 1, 11], [2, 12, 3, 13]])]).tolist() == [[0, 2], [1, 3], [10, 12], [11, 13]]
    assert layout.to_megatron([torch.tensor([0.0, 10, 1, 11])]).tolist() == [0, 1, 10, 11]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Whole(), [(6,)]),
        (Whole(dim=1), [(5, 8)]),
        (GatedPair(), [(12, 5), (12, 5)]),
        (Transposed(), [(6, 5)]),
        (InterleavedPair(), [(5, 12)]),
        (InterleavedPair(), [(12,)]),
        (GroupedQKV(num_groups=4, head_dim=3), [(24, 5), (12, 5), (12, 5)]),
        (GroupedQKV(num_groups=4, head_dim=3), [(24,), (12,), (12,)]),
        (PaddedVocabulary(vocab_size=97, padded_vocab_size=104), [(97, 5)]),
    ],
)
def test_round_trip_is_bit_exact(layout: Whole, shapes: list[tuple[int, ...]], size: int) -> None:
    parts = [torch.randn(shape) for shape in shapes]
    full = layout.to_megatron(parts)
    shards = [shard(layout, parts, size, rank) for rank in range(size)]
    assert torch.equal(layout.unshard(shards), full)
    for part, back in zip(parts, layout.to_hf(layout.unshard(shards)), strict=True):
        assert torch.equal(part, back)


def _names(rules: tuple[Rule, ...]) -> list[str]:
    """The tensors that the rules read, each place of a stack counted once."""
    for _, group in itertools.groupby(rules, key=lambda rule: rule.hf):
        places = [rule.stack for rule in group]
        assert places == [None] or places == [Stack(index, len(places)) for index in range(len(places))]
    return [name for rule in rules if rule.stack is None or rule.stack.index == 0 for name in rule.hf]


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("deepseek_v2_moe", "glm4_moe")])  # transformers has none of these two
def test_every_tensor_of_a_token_classifier_has_one_rule(tmp_path: Path, kind: str) -> None:
    """A critic as transformers saves it: the decoder under the same names, `score` instead of an output layer."""
    config = copy.deepcopy(CONFIGS[kind])
    config.num_labels = 1
    AutoModelForTokenClassification.from_config(config).save_pretrained(tmp_path)
    names = _names(load_model(tmp_path).critic_rules(104))
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(tmp_path).names


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_tensor_of_a_checkpoint_has_one_rule(tmp_path: Path, kind: str) -> None:
    make_model(tmp_path, kind)
    names = _names(load_model(tmp_path).rules(104))
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint(tmp_path).names


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' has no weight mapping"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "Missing required keys in `rope_parameters`"),
        ({"hidden_size": "64"}, "transformers refuses it"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention, but sliding_window or use_sliding_window turns the window off"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"use_sliding_window": True, "sliding_window": 0, "layer_types": ["sliding_attention"] * 4}, "sliding_window=0 hides a token from itself"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "max_window_layers=4 with sliding_attention in layer_types: vLLM then leaves the window out",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "only weights that are not quantized are read; write them in bfloat16 first"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"surprising_new_field": 3}, "surprising_new_field=3"),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'] has no weight mapping"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0 must be at least 1"),
        ({"num_hidden_layers": 0, "layer_types": [], "num_key_value_heads": -2}, "num_hidden_layers=0, num_key_value_heads=-2 must be at least 1"),
    ],
)
def test_a_setting_without_a_mapping_is_refused(tmp_path: Path, change: dict, part: str) -> None:
    config = CONFIGS["qwen3"].to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=part.replace("[", r"\[")):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (b"[]", "config.json holds a JSON array instead of an object; download"),
        (b"{", "cannot read .*config.json: JSONDecodeError"),
        (b"\xff\xfe\x00", "cannot read"),
    ],
)
def test_a_configuration_that_is_none_is_named(tmp_path: Path, written: bytes, told: str) -> None:
    (tmp_path / "config.json").write_bytes(written)
    with pytest.raises(UserError, match=told):
        load_model(tmp_path)


# config.json as the authors published it, without what only generation looks at. Fields of their own modelling code are among them.
_COMMON = dict(hidden_act="silu", initializer_range=0.02, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.40.1", use_cache=True)
PUBLISHED: dict[str, tuple[dict, dict]] = {
    "Qwen2.5-0.5B": (
        dict(model_type="qwen2", attention_dropout=0.0, hidden_size=896, intermediate_size=4864, max_position_embeddings=32768, max_window_layers=24)
        | dict(num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=32768)
        | dict(use_mrope=False, use_sliding_window=False, vocab_size=151936),
        dict(kv_channels=64, add_qkv_bias=True),
    ),
    "Llama-3.1-8B": (
        dict(model_type="llama", attention_bias=False, attention_dropout=0.0, hidden_size=4096, intermediate_size=14336, max_position_embeddings=131072)
        | dict(mlp_bias=False, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-5, rope_theta=5e5)
        | dict(rope_scaling=dict(factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192, rope_type="llama3"))
        | dict(vocab_size=128256),
        dict(kv_channels=128, num_query_groups=8),
    ),
    "Mixtral-8x7B": (
        dict(model_type="mixtral", attention_dropout=0.0, hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32)
        | dict(num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5)
        | dict(rope_theta=1e6, router_aux_loss_coef=0.02, sliding_window=None, vocab_size=32000),
        dict(num_moe_experts=8, moe_ffn_hidden_size=14336, moe_router_pre_softmax=False),
    ),
    "Mistral-7B-v0.1": (
        dict(model_type="mistral", hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32)
        | dict(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=4096, vocab_size=32000),
        dict(window_size=(4095, 0), window_attn_skip_freq=[1] * 32),  # 4096 tokens, the last of which is the one that looks
    ),
    "gpt-oss-20b, dequantized": (
        dict(model_type="gpt_oss", attention_bias=True, attention_dropout=0.0, experts_per_token=4, head_dim=64, hidden_size=2880, intermediate_size=2880)
        | dict(initial_context_length=4096, layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072)
        | dict(num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, rms_norm_eps=1e-5)
        | dict(output_router_logits=False, rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, vocab_size=201088)
        | dict(rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn", truncate=False)),
        dict(window_size=(127, 0), window_attn_skip_freq=[1, 0] * 12, moe_router_topk=4, moe_router_pre_softmax=False, softmax_type="learnable"),
    ),
    "DeepSeek-V3": (
        dict(model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=3)
        | dict(hidden_size=7168, intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=2048, moe_layer_freq=1)
        | dict(n_group=8, n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8)
        | dict(num_hidden_layers=61, num_key_value_heads=128, num_nextn_predict_layers=1, pretraining_tp=1, q_lora_rank=1536, qk_nope_head_dim=128)
        | dict(qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, topk_group=4)
        | dict(rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096, type="yarn"))
        | dict(topk_method="noaux_tc", v_head_dim=128, vocab_size=129280),
        dict(moe_router_num_groups=8, moe_router_group_topk=4, moe_shared_expert_intermediate_size=2048, moe_layer_freq=[0] * 3 + [1] * 58, mscale_all_dim=1.0),
    ),
    "DeepSeek-V2-Lite": (
        dict(model_type="deepseek_v2", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_size=2048)
        | dict(intermediate_size=10944, kv_lora_rank=512, max_position_embeddings=163840, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1)
        | dict(n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27)
        | dict(num_key_value_heads=16, pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6, rope_theta=10000)
        | dict(rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707, original_max_position_embeddings=4096, type="yarn"))
        | dict(routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, topk_group=1, topk_method="greedy", v_head_dim=128, vocab_size=102400),
        dict(moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=2816, q_lora_rank=None),
    ),
    "GLM-4.5-Air": (
        dict(model_type="glm4_moe", attention_bias=True, attention_dropout=0.0, first_k_dense_replace=1, head_dim=128, hidden_size=4096)
        | dict(intermediate_size=10944, max_position_embeddings=131072, moe_intermediate_size=1408, n_group=1, n_routed_experts=128, n_shared_experts=1)
        | dict(norm_topk_prob=True, num_attention_heads=96, num_experts_per_tok=8, num_hidden_layers=46, num_key_value_heads=8, num_nextn_predict_layers=1)
        | dict(partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.0, topk_group=1, use_qk_norm=False)
        | dict(vocab_size=151552),
        dict(qk_layernorm=False, add_qkv_bias=True, moe_router_enable_expert_bias=True, moe_router_topk_scaling_factor=1.0),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_understood(tmp_path: Path, name: str) -> None:
    published, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(_COMMON | published))
    settings = load_model(tmp_path).settings
    assert {field: settings[field] for field in expected} == expected


def test_the_published_weights_of_gpt_oss_are_refused_with_the_remedy(tmp_path: Path) -> None:
    published = _COMMON | PUBLISHED["gpt-oss-20b, dequantized"][0] | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    with pytest.raises(UserError, match=r"quantization_config=Mxfp4Config\(dequantize=True\)\), then save_pretrained\(..., save_original"):
        load_model(tmp_path)


def test_rope_by_hand(tmp_path: Path) -> None:
    """head_dim 32 at theta 10^4: pair 0 turns by 1 a position, pair 8 by 10^-2.

    linear: divided by the factor. llama3: wavelengths above 16 / 1 positions are divided, those below 16 / 2 stay (2 pi is below, 628 above).
    YaRN: pair 0 is kept and the last ones divided; cosine and sine grow by 0.1 ln 4 + 1.
    """
    scaled = {
        "default": ({}, 1.0, 0.01, 1.0),
        "linear": ({"factor": 4.0}, 0.25, 0.0025, 1.0),
        "llama3": ({"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0, "original_max_position_embeddings": 16}, 1.0, 0.0025, 1.0),
        "yarn": ({"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 1.0}, 1.0, 0.0025, 0.1 * math.log(4) + 1),
    }
    for kind, (parameters, first, ninth, factor) in scaled.items():
        config = CONFIGS["llama"].to_dict() | {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | parameters}
        (tmp_path / "config.json").write_text(json.dumps(config))
        rope = load_model(tmp_path).rope
        assert rope.inv_freq.shape == (16,)
        assert (float(rope.inv_freq[0]), float(rope.inv_freq[8]), rope.attention_factor) == pytest.approx((first, ninth, factor), rel=1e-6), kind


def test_only_tensors_without_a_part_in_training_are_left_out(tmp_path: Path) -> None:
    original = make_model(tmp_path / "model", "deepseek_v3_moe").state_dict()  # 4 layers and, by its configuration, one that drafts
    model = load_model(tmp_path / "model")
    assert model.is_left_out("model.layers.4.eh_proj.weight") and model.is_left_out("model.layers.0.self_attn.rotary_emb.inv_freq")
    for name in ("model.layers.3.mlp.gate.weight", "model.layers.5.eh_proj.weight", "model.layers.40.eh_proj.weight", "lm_head.weight"):
        assert not model.is_left_out(name)
    described = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in original.items()]
    Export(tmp_path / "out", described, source=tmp_path / "model", dtype=torch.float32).write(original.items())
    assert (model.config.num_nextn_predict_layers, load_model(tmp_path / "out").config.num_nextn_predict_layers) == (1, 0)


def _write_sharded(directory: Path, weight_map: object, **files: list[str]) -> None:
    """An index with `weight_map` beside files of tensors with these names."""
    for file, names in files.items():
        save_file({name: torch.zeros(2) for name in names}, directory / f"{file}.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        _ = Checkpoint(tmp_path).names
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        _ = Checkpoint(tmp_path).names
    _write_sharded(tmp_path, {"a": "model.safetensors", "b": "gone.safetensors"}, model=["a"])
    with pytest.raises(UserError, match="gone.safetensors"):
        _ = Checkpoint(tmp_path).names


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ('{"weight_map": {"a"', "cannot read .*index.json: JSONDecodeError.*download the checkpoint again"),
        (b"\xff\xfe\x00", "cannot read .*index.json: UnicodeDecodeError.*download the checkpoint again"),
        ("[]", "index.json holds a JSON array instead of an object; download the checkpoint again"),
        ("{}", "index.json has no weight_map of tensors to files"),
        ('{"weight_map": {}}', "index.json has no weight_map of tensors to files"),
        ('{"weight_map": ["a"]}', "index.json has no weight_map of tensors to files"),
        ('{"weight_map": {"a": 1}}', "index.json has no weight_map of tensors to files"),
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, index: str | bytes, told: str) -> None:
    (tmp_path / INDEX).write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(UserError, match=told):
        _ = Checkpoint(tmp_path).names


def test_the_files_say_which_tensors_there_are(tmp_path: Path) -> None:
    """Not the index, which may leave one out; one that it alone names, or that two files hold, is a fault."""
    _write_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=["a"], two=["b", "extra"])
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {"a", "b", "extra"} and checkpoint.shape("extra") == (2,)
    _write_sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, one=["a"], two=["a", "b"])
    with pytest.raises(UserError, match=r"does not fit its files: c is in none of the files; a is in one.safetensors and two.safetensors;"):
        _ = Checkpoint(tmp_path).names


@pytest.mark.parametrize("listing", [b"\xff\xfe\x00\x80", b"no checksum\n", b"99aa06d3014798d86001c324468d497f  ../\x00\n"])
def test_a_list_of_checksums_that_is_none_is_named(tmp_path: Path, listing: bytes) -> None:
    (tmp_path / "XXH128SUMS").write_bytes(listing)
    with pytest.raises(UserError, match="does not fit its XXH128SUMS"):
        Checkpoint(tmp_path).check()


def test_weights_that_cannot_be_are_named(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.tensor([1.0, torch.nan, torch.inf]), "c": torch.zeros(3, dtype=torch.float8_e4m3fn), "d": torch.zeros(1).long()}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.get("a"), tensors["a"])
    for name, part in (("b", "b in .* holds 2 values that are NaN or infinite"), ("c", "c in .* is float8_e4m3fn"), ("d", "d in .* is int64")):
        with pytest.raises(UserError, match=part):
            checkpoint.get(name)


class _Bomb:
    """Unpickling it writes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.target, "opened")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "indexed"])
def test_a_pickle_is_refused_and_not_opened(tmp_path: Path, name: str) -> None:
    """Beside nothing else, under the name of a safetensors file, and named by an index."""
    file = tmp_path / ("pytorch_model.bin" if name == "indexed" else name)
    torch.save({"a": _Bomb(tmp_path / "opened")}, file)
    if name == "indexed":
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file.name}}))
    with pytest.raises(UserError, match="safetensors"):
        Checkpoint(tmp_path).get("a")
    assert not (tmp_path / "opened").exists()
    torch.load(file.rename(tmp_path / "any.pt"), weights_only=False)
    assert (tmp_path / "opened").exists()  # so it would have
