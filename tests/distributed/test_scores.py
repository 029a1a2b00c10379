"""Scores of single tokens in Megatron against transformers and autograd in float64, and the diagnosis on two ranks against one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.config import validate as validate_config
from otb_megatron.data.packing import build_microbatch
from otb_megatron.mcore.model import build_model
from otb_megatron.mcore.parallel import start_parallel, stop_parallel
from otb_megatron.mcore.score import ScoreProbe
from otb_megatron.mcore.shards import load_weights
from otb_megatron.rollout.recording import load_rollouts
from otb_megatron.trainer.diagnose import diagnose_variance
from otb_megatron.types import Trajectories
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import Checkpoint
from tests.distributed.launcher import run_ranks
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

TEMPERATURE = 0.7
WHOLE, SKETCH = 10**9, 2048
NUM_SAMPLES = 3
# Part of a Hugging Face name -> kind of layer; the first that fits.
HF_KINDS = (("norm", "norm"), ("self_attn", "attention"), ("mlp.gate.", "router"), ("mlp.experts", "experts"), ("mlp.", "mlp"), ("lm_head", "output"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scores")
    for kind in ("qwen2", "qwen3_tied", "qwen3_moe"):
        make_model(directory / kind, kind)
    record_samples(directory / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1)
    return directory


def _measure(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    config = validate_config(values, "test")
    hf = load_model(config.model.path)
    model = build_model(config, hf, start_parallel(config.parallel, seed=0, deadline_s=60))
    load_weights(model, Checkpoint(hf.path))
    trajectories = Trajectories.from_samples(load_rollouts(config.rollout.replay_dir, 1))  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for size in (WHOLE, SKETCH):
        probe = ScoreProbe(model, temperature=TEMPERATURE, sketch_size=size, seed=5)
        scores = [
            probe.measure(build_microbatch(trajectories, [sample], sequence_multiple=1, total_multiple=1, pad_token_id=0)) for sample in range(NUM_SAMPLES)
        ]
        sketch = torch.cat([one.sketch for one in scores]).double()
        found[f"gram {size}"] = sketch @ sketch.t()
    found["token"] = dict(zip(probe.kinds, torch.cat([one.squared_norm for one in scores], 1), strict=True))
    found["cumulative"] = dict(zip(probe.kinds, torch.cat([one.cumulative_squared_norm for one in scores], 1), strict=True))
    found["log_prob"] = torch.cat([one.statistics.log_prob for one in scores])
    stop_parallel()
    return found


def _hf_kind(name: str, tied: bool) -> str:
    kind = next((kind for part, kind in HF_KINDS if part in name), "embedding")
    return "embedding_and_output" if kind == "embedding" and tied else kind


def _oracle(model_dir: Path, trajectories: Trajectories, tied: bool) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Kind -> [sample] -> [actions, parameters of the kind], each log-prob differentiated by autograd in a forward pass of its own; log-probs."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, experts_implementation="eager").eval()
    names, parameters = zip(*model.named_parameters(), strict=True)
    rows: dict[str, list[Tensor]] = {}
    log_probs = []
    for sample in range(NUM_SAMPLES):
        first, last = trajectories.token_offsets[sample], trajectories.token_offsets[sample + 1]
        tokens = trajectories.tokens[first:last]
        of_sample: dict[str, list[Tensor]] = {}
        for position in (trajectories.action_positions[trajectories.action_offsets[sample] : trajectories.action_offsets[sample + 1]] - first).tolist():
            # Only what stands before the token: nothing after it may have a part in its gradient.
            log_pi = torch.log_softmax(model(tokens[None, :position]).logits[0, -1] / TEMPERATURE, -1)
            log_prob = log_pi[tokens[position]]
            log_probs.append(log_prob.detach())
            gradients = torch.autograd.grad(log_prob, parameters, allow_unused=True, materialize_grads=True)
            by_kind: dict[str, list[Tensor]] = {}
            for name, gradient in zip(names, gradients, strict=True):
                by_kind.setdefault(_hf_kind(name, tied), []).append(gradient.flatten())
            for kind, parts in by_kind.items():
                of_sample.setdefault(kind, []).append(torch.cat(parts))
        for kind, of_actions in of_sample.items():
            rows.setdefault(kind, []).append(torch.stack(of_actions))
    return rows, torch.stack(log_probs)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_tied", "qwen3_moe"])
def test_scores_equal_transformers_and_autograd(work: Path, kind: str) -> None:
    """Squared norms of every token and of every running sum, by kind of layer, and all inner products: 1e-4 of the largest.

    In the sketch a squared norm is off by at most five times its standard error, sqrt(2 / 2048) = 3.1 %.
    """
    found = run_ranks(_measure, 1, settings(work / kind, work), timeout_s=240)[0]
    trajectories = Trajectories.from_samples(load_rollouts(work / "rollouts", 1))
    rows, log_prob = _oracle(work / kind, trajectories, tied=kind == "qwen3_tied")
    assert float((found["log_prob"] - log_prob).abs().max()) < 5e-5
    expected_kinds = {"qwen2": {"embedding", "mlp", "output"}, "qwen3_tied": {"embedding_and_output", "mlp"}}
    assert set(found["token"]) == {"norm", "attention"} | expected_kinds.get(kind, {"embedding", "router", "experts", "output"})
    assert set(found["token"]) == set(rows)
    for name, of_samples in rows.items():
        for level, scores in (("token", torch.cat(of_samples)), ("cumulative", torch.cat([one.cumsum(0) for one in of_samples]))):
            want = scores.square().sum(1)
            assert want.min() > 0
            assert float(((found[level][name] - want) / want.max()).abs().max()) < 1e-4, (level, name)
    whole = torch.cat([torch.cat(of_samples) for of_samples in rows.values()], 1)
    gram = whole @ whole.t()
    assert float((found[f"gram {WHOLE}"] - gram).abs().max() / gram.max()) < 1e-4
    from_sketch = found[f"gram {SKETCH}"].diagonal() / gram.diagonal() - 1
    assert 0 < from_sketch.abs().max() < 5 * (2 / SKETCH) ** 0.5


def _diagnose(rank: int, world_size: int, values: dict[str, Any], output: Path) -> None:
    diagnose_variance(validate_config(values, "test"), output)


def _numbers(value: Any) -> list[float | None]:
    """Every number of a nested result, in order."""
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in _numbers(inner)]
    return [value] if isinstance(value, int | float) or value is None else []


def test_two_ranks_find_what_one_finds(work: Path, tmp_path: Path) -> None:
    """Five prompts on one rank, and three and two of them on two: the same numbers in the same places."""
    record_samples(tmp_path / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1, group_size=4)
    values = settings(work / "qwen3_tied", tmp_path, diagnose={"num_prompts": 5, "num_responses": 4, "group_sizes": [2]})
    # A parallel layout of the training run has no part in it.
    values["parallel"] = {"tensor_model_parallel_size": 2}
    results = []
    for world_size in (1, 2):
        run_ranks(_diagnose, world_size, values, tmp_path / str(world_size), timeout_s=240)
        results.append(json.loads((tmp_path / str(world_size) / "variance.json").read_text()))
    assert results[0]["data"]["prompts"] == 5 and results[0]["data"]["responses"] == 20
    left, right = (_numbers(result) for result in results)
    assert len(left) == len(right) > 300
    for one, other in zip(left, right, strict=True):
        assert one == other or one == pytest.approx(other, rel=1e-3, abs=1e-5)
