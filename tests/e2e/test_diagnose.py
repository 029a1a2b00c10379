"""`otb-megatron diagnose variance` from a configuration to its files, on recorded samples, and what it refuses."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from otb_megatron import cli
from otb_megatron.algorithms.proxy_fit import RATIO_QUANTILES
from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model

QUANTITIES = {"variance", "relative_variance", "relative_to_rloo", "relative_bias_squared", "scale", "cosine"}
ESTIMATORS = {
    "optimal_token_baseline",
    "optimal_token_baseline_loo",
    "optimal_token_baseline_true_energy",
    "optimal_global_baseline",
    "opo",
    "grpo",
    "grpo_passk",
    "rloo",
    "gpg",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("diagnose")
    make_model(directory / "model", "qwen3_moe")
    make_model(directory / "dense", "qwen2")
    record_samples(directory / "rollouts", vocab_size=VOCAB_SIZE, num_steps=1, group_size=6, seed=3)
    return directory


def _file(work: Path, tmp_path: Path, **sections: dict[str, Any]) -> str:
    values = settings(work / "model", work, diagnose={"num_prompts": 3, "num_responses": 6, "group_sizes": [2, 3]}, **sections)
    values["trainer"]["output_dir"] = str(tmp_path / "run")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_mixture_of_experts_from_recorded_samples(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON, page, pictures and tables; the numbers that must hold whatever the model."""
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), "--output", str(tmp_path / "found")]) == 0
    printed = capsys.readouterr()
    assert "they are not its own" in printed.err, "the log-probs of the recording are random, which it must notice"
    result = json.loads((tmp_path / "found/variance.json").read_text())

    assert result["data"]["prompts"] == 3 and result["data"]["responses"] == 18
    assert result["sketch"]["size"] == 8192 and 0 < result["sketch"]["measured_error"] < 5 * result["sketch"]["error_bound"]
    assert set(result["estimators"]) == ESTIMATORS
    for of_size in result["estimators"].values():
        assert set(of_size) == {"2", "3"}
        assert all(set(of_one) == QUANTITIES for of_one in of_size.values())
    loo, rloo = (result["estimators"][name] for name in ("optimal_token_baseline_loo", "rloo"))
    assert loo["2"]["relative_bias_squared"] == loo["3"]["relative_bias_squared"] == [0.0, 0.0, 0.0]
    assert rloo["2"]["relative_to_rloo"] == [1.0, 1.0, 1.0]
    estimate, low, high = rloo["2"]["variance"]
    assert 0 < low < estimate < high

    kinds = ["embedding", "norm", "attention", "router", "experts", "output", "all"]
    for level in ("token", "cumulative"):
        assert list(result["energy"][level]) == kinds
        for fit in result["energy"][level].values():
            assert len(fit["ratio_quantiles"]) == len(RATIO_QUANTILES) and fit["ratio_quantiles"][2] == 1.0
            assert all(-1 <= value <= 1 for value in fit["rank_correlation"])
        assert sum(result["energy"][level][kind]["share"] for kind in kinds[:-1]) == pytest.approx(1.0, abs=1e-5)

    page = (tmp_path / "found/variance.html").read_text()
    embedded = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    files = [path.read_bytes() for path in (tmp_path / "found").glob("*.svg")]
    assert len(files) == len(embedded) == 5 and {base64.b64decode(one) for one in embedded} == set(files)
    assert all(ElementTree.fromstring(svg).tag.endswith("svg") for svg in files)
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs no other file"
    for text in ("token, router", "optimal_token_baseline against leave-one-out", "N=2", "variance.html"):
        assert text in printed.out
    assert re.search(r"(\d+)/\1 tokens  elapsed", printed.out), "progress ends with all tokens"


def test_options_reach_the_configured_estimator_only_and_recompute_none(work: Path, tmp_path: Path) -> None:
    tables = []
    for options in ({}, {"tail": "mean"}):
        path = _file(work, tmp_path, algorithm={"advantage_options": options})
        assert cli.main(["diagnose", "variance", path, "diagnose.group_sizes=[2]", "diagnose.num_prompts=2"]) == 0
        tables.append(json.loads((tmp_path / "run/diagnose/variance.json").read_text())["estimators"])
    selective = ["megatron.recompute_granularity=selective", "megatron.recompute_modules=[layernorm]"]
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), "diagnose.group_sizes=[2]", "diagnose.num_prompts=2", *selective]) == 0
    assert json.loads((tmp_path / "run/diagnose/variance.json").read_text())["estimators"] == tables[0], "recompute changes nothing"
    differing = {name for name in ESTIMATORS if tables[0][name]["2"]["variance"] != tables[1][name]["2"]["variance"]}
    assert differing == {"optimal_token_baseline", "optimal_token_baseline_true_energy"}


def test_it_refuses_recorded_experts_for_a_dense_model(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), f"model.path={work / 'dense'}", "rollout.router_replay=true"]) == 2
    assert "dense is a dense model, which routes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["diagnose.group_sizes=[1,2]"], ["a group of one has no baseline"]),
        (["diagnose.group_sizes=[8]"], ["num_responses=6 are too few for groups of 8", "set num_responses=16"]),
        (["diagnose.group_sizes=[4]", "diagnose.num_responses=8"], ["a prompt has 6 responses", "groups of 4 take 8", "at most 3", "rollout.n=8"]),
        (["diagnose.max_actions=40"], ["diagnose.max_actions=40", "takes two at least"]),
        (["rollout.replay_dir=nowhere"], ["rollout.replay_dir=nowhere", "rollout.save=true"]),
        (["algorithm.advantage=gae"], ["algorithm.advantage='gae' is not measured: it needs values", "set another one"]),
        (
            ["algorithm.reward_kl={}", "algorithm.rollout_correction=masked", "algorithm.whiten_advantages=true", "rewards.overlong_buffer_tokens=4"],
            ["algorithm.reward_kl, algorithm.rollout_correction, algorithm.whiten_advantages, rewards.overlong_buffer_tokens: no part of `diagnose variance`"],
        ),
        (["algorithm.advantage_options.tale=hold", "megatron.gradient_accumulation_fusion=true"], ["did you mean 'tail'?", "gradient_accumulation_fusion"]),
    ],
)
def test_what_it_refuses(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: list[str]) -> None:
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), *overrides]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert "Traceback" not in error


def test_it_refuses_to_sample_without_an_engine(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest))
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), "rollout.replay_dir=null"]) == 2
    assert "there is no vLLM to sample with" in capsys.readouterr().err


def test_it_refuses_one_prompt(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [sample for sample in load_rollouts(work / "rollouts", 1) if sample.group == 0]
    save_rollouts(tmp_path / "one", 1, samples)
    assert cli.main(["diagnose", "variance", _file(work, tmp_path), f"rollout.replay_dir={tmp_path / 'one'}"]) == 2
    assert "responses to one prompt only" in capsys.readouterr().err
