"""No field of a model's configuration is ignored in silence.

For every architecture each field of a tiny model's configuration gets another value, one at a time. Then either our logits are
those of transformers with that value, or loading the model raises a UserError that names the field.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from otb_megatron.config import validate as validate_config
from otb_megatron.data.packing import build_microbatch
from otb_megatron.mcore.attention import PackedSequences
from otb_megatron.mcore.model import build_model, check_divisible
from otb_megatron.mcore.parallel import Parallel, start_parallel
from otb_megatron.mcore.router import PackRouting, routing
from otb_megatron.mcore.shards import load_weights
from otb_megatron.types import Prompt, Response, Sample, Trajectories, UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import run_ranks
from tests.models import CONFIGS, VOCAB_SIZE, random_model

TOLERANCE = 1e-4
# Of the two sequences one is longer than the 16 positions that the scaled variants were "trained" on.
TOKENS = [torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)) for length in (40, 9)]
# Fields of every configuration of transformers, for bookkeeping and for generation. `tie_word_embeddings` is the one of them that matters.
BOOKKEEPING = set(PretrainedConfig().to_dict()) - {"tie_word_embeddings"} | {"model_type"}
ROPE = [
    dict(rope_type="default", rope_theta=500.0),
    dict(rope_type="linear", rope_theta=1e4, factor=3.0),
    dict(rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_position_embeddings=16),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0, truncate=False),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, attention_factor=0.6),
    dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=1.2, mscale_all_dim=0.5),
    dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.25),
    dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    dict(rope_type="longrope", rope_theta=1e4, factor=4.0, short_factor=[1.0] * 16, long_factor=[2.0] * 16, original_max_position_embeddings=16),
]
# For fields whose other values are not a matter of doubling or flipping, in all or in one architecture.
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["gelu"],
    "rope_parameters": ROPE,
    "layer_types": [["sliding_attention"] * 2],
    "mlp_only_layers": [[0]],
    "sliding_window": [None, 7],
    "head_dim": [16],
    "num_key_value_heads": [1, 4],
    "n_group": [1, 2],
    "qk_head_dim": [40],
    "topk_method": ["greedy", "group_limited_greedy", "other"],
    "scoring_func": ["softmax"],
    "q_lora_rank": [32],
    "first_k_dense_replace": [0],
}

# Fields of published models that transformers does not look at.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {"sliding_window": 7},
    "deepseek_v2": {"scoring_func": "sigmoid", "moe_layer_freq": 2, "seq_aux": True},
    "deepseek_v3": {"moe_layer_freq": 2, "ep_size": 2},
    "qwen2": {"use_mrope": True},
}
LEGACY_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
REFUSED_BY_TRANSFORMERS = {"topk_group=2", "n_group=1"}  # more groups to choose than there are, in GLM-4.5 and in DeepSeek-V2


def _others(field: str, value: Any) -> list[Any]:
    """Values of `field` other than `value`."""
    if field in VALUES:
        return [other for other in VALUES[field] if other != value] + ([None] if field == "q_lora_rank" and value is not None else [])
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1]
    if isinstance(value, float):
        return [1.7 * value or 0.3]
    assert value is None, f"no other value of {field}={value!r} is known here"
    return [2]


def _fields(rank: int, world_size: int, kind: str) -> dict[str, str]:
    """For each field and value what came of it: how far the logits are off, or the message that refuses it."""
    base = copy.deepcopy(CONFIGS[kind])
    base.num_hidden_layers = 2
    base.initializer_range = 0.1  # logits of a few units, whose rounding in float32 stays far below the tolerance
    fields = base.to_dict()
    changed = sorted(set(fields) - BOOKKEEPING)
    # transformers derives these where they are not written down.
    derived = ["layer_types"] + (["head_dim", "qk_head_dim"] if "qk_nope_head_dim" in fields else [])
    fields = {field: value for field, value in fields.items() if field not in derived}
    parallel = start_parallel(validate_config({"model": {"path": "unused"}, "data": {"train": {"path": "unused"}}}, "test").parallel, seed=0, deadline_s=60)
    found = {"as it is": _compare(fields, parallel)}
    for field in changed:
        for value in _others(field, base.to_dict()[field]):
            found[f"{field}={value!r}"] = _compare(fields | {field: value}, parallel)
    for field, value in PUBLISHED.get(base.model_type, {}).items():
        found[f"{field}={value!r}"] = _compare(fields | {field: value}, parallel)
    older = {field: value for field, value in fields.items() if field != "rope_parameters"}
    found["rope_theta=500.0"] = _compare(older | {"rope_theta": 500.0}, parallel)
    found["rope_scaling=yarn"] = _compare(older | {"rope_theta": 500.0, "rope_scaling": LEGACY_YARN}, parallel)
    return found


def _compare(fields: dict[str, Any], parallel: Parallel) -> str:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        try:
            random_model(CONFIG_MAPPING[fields["model_type"]].from_dict(copy.deepcopy(fields))).save_pretrained(directory)
            (directory / "config.json").write_text(json.dumps(fields))
            expected = _theirs(directory)
        except Exception as error:  # anything: transformers does not check its configurations before it uses them
            (directory / "config.json").write_text(json.dumps(fields))
            expected = f"transformers refuses it: {type(error).__name__} {error}"
        values = {"model": {"path": name, "dtype": "float32", "make_vocab_size_divisible_by": 8}, "data": {"train": {"path": "unused"}}}
        try:
            got = _ours(values, parallel, loads=not isinstance(expected, str))
        except UserError as error:
            return f"refused: {error}"
    if isinstance(expected, str):
        return expected
    return f"off by {max(float((g - e).abs().max()) for g, e in zip(got, expected, strict=True)):.1e}"


@torch.no_grad()
def _theirs(directory: Path) -> list[Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, experts_implementation="eager").eval()
    return [model(tokens[None]).logits[0] for tokens in TOKENS]


def _ours(values: dict[str, Any], parallel: Parallel, *, loads: bool) -> list[Tensor]:
    config = validate_config(values, "test")
    hf = load_model(config.model.path)
    check_divisible(config, hf)
    model = build_model(config, hf, parallel)
    if not loads:
        return []
    load_weights(model, Checkpoint(hf.path))
    samples = [
        Sample(Prompt(0, "test", (), (int(tokens[0]),), "", {}), Response(tuple(tokens[1:].tolist()), (0.0,) * (len(tokens) - 1), "", "stop", 0), 0, 0.0)
        for tokens in TOKENS
    ]
    microbatch = build_microbatch(Trajectories.from_samples(samples), range(len(TOKENS)), sequence_multiple=1, total_multiple=1, pad_token_id=0)
    with torch.no_grad():
        pack = PackedSequences.of(microbatch, model.config, 1, 0, parallel.device)
        with routing(model.chunks[0], PackRouting.of(microbatch, pack.local_rows, parallel.device, replays=False)):
            logits = model.chunks[0](microbatch.tokens[None], microbatch.position_ids[None], None, packed_seq_params=pack)[0, :, : hf.vocab_size]
    return [rows[: len(tokens)] for rows, tokens in zip(logits.split(microbatch.cu_seqlens.diff().tolist()), TOKENS, strict=True)]


# Each family once: the other tiny models of a family are among the changes.
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("qwen3_tied", "qwen3_moe_unnormalised")])
def test_each_field_is_followed_or_refused_by_name(kind: str) -> None:
    found = run_ranks(_fields, 1, kind, timeout_s=240)[0]
    print("\n".join(f"{change}: {outcome}" for change, outcome in found.items()))
    wrong = []
    for change, outcome in found.items():
        if outcome.startswith("refused"):
            right = change.split("=")[0] in outcome
        elif outcome.startswith("off by"):
            right = float(outcome.removeprefix("off by ")) < TOLERANCE
        else:
            right = change in REFUSED_BY_TRANSFORMERS
        if not right:
            wrong.append(f"{change}: {outcome}")
    assert found["as it is"].startswith("off by")
    assert not wrong, "\n".join(wrong)
