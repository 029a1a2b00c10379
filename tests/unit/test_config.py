"""Loading a configuration: what is read, what is refused, and what the message says."""

from __future__ import annotations

from pathlib import Path

import pytest

from otb_megatron.config import Config, load
from otb_megatron.types import UserError

MINIMAL = "model: {path: m}\ndata: {train: {reasoning_gym: chain_sum}}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_defaults_and_overrides(file: Path) -> None:
    config = load(file, ["rollout.n=4", "algorithm.advantage=grpo", "optimizer.lr=1e-4", "megatron.recompute_granularity=full", "data.validation.path=x.jsonl"])
    assert (config.rollout.n, config.algorithm.advantage, config.optimizer.lr) == (4, "grpo", 1e-4)
    assert config.megatron == {"recompute_granularity": "full"}
    assert config.data.validation is not None and config.data.validation.path == Path("x.jsonl")
    assert config.rollout.temperature == 1.0


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1.5e3", 1500.0), ("3", 3.0), (".5", 0.5)])
def test_floats_as_people_write_them(file: Path, text: str, value: float) -> None:
    assert load(file, [f"optimizer.lr={text}"]).optimizer.lr == value


def test_integers_stay_integers(file: Path) -> None:
    assert load(file, ["rollout.vllm.max_num_seqs=64"]).rollout.vllm == {"max_num_seqs": 64}
    assert isinstance(load(file, ["rollout.vllm.max_num_seqs=64"]).rollout.vllm["max_num_seqs"], int)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.temprature=1", ["rollout.temprature", "unknown key", "'temperature'"]),
        ("trainer.lr=1", ["trainer.lr", "'optimizer.lr'"]),
        ("rollout.n=two", ["rollout.n='two'", "valid integer"]),
        ("rollout.n=0", ["rollout.n=0", "greater than 0"]),
        ("algorithm.kl_estimator=k4", ["algorithm.kl_estimator='k4'", "'k1', 'k2' or 'k3'"]),
        ("data.train.path=x", ["data.train", "exactly one of `path` and `reasoning_gym`"]),
        ("parallel.virtual_pipeline_model_parallel_size=2", ["parallel", "needs `pipeline_model_parallel_size` > 1"]),
        ("optimizer={optimizer_offload_fraction: 1, use_distributed_optimizer: false}", ["optimizer", "needs `use_distributed_optimizer: true`"]),
        ("rewards.failure_reward=.nan", ["rewards.failure_reward=nan", "finite number"]),
        ("algorithm.kl_coef=.inf", ["algorithm.kl_coef=inf", "finite number"]),
        ("algorithm.reward_kl={coef: .inf}", ["algorithm.reward_kl.coef=inf", "finite number"]),
        ("algorithm.reward_kl={adaptive: {target: .inf}}", ["algorithm.reward_kl.adaptive.target=inf", "finite number"]),
        ("rollout.temperature=.inf", ["rollout.temperature=inf", "finite number"]),
        ("rollout.dynamic_sampling={oversampling: .inf}", ["rollout.dynamic_sampling.oversampling=inf", "finite number"]),
        ("rollout.n", ["rollout.n", "section.key=value"]),
        ("rollout.n.m=3", ["rollout.n", "valid integer"]),
        ("algorithm.advantage.tail=hold", ["algorithm.advantage"]),
    ],
)
def test_a_wrong_setting_is_named_with_the_way_out(file: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(file, [override])
    for part in parts:
        assert part in str(error.value)


def test_all_faults_come_at_once(file: Path) -> None:
    with pytest.raises(UserError) as error:
        load(file, ["rollout.n=0", "trainer.num_step=3", "optimizer.lr=-1"])
    assert "3 setting(s)" in str(error.value)


@pytest.mark.parametrize(("text", "part"), [("model: [", "not valid YAML"), ("- a", "mapping of sections"), ("data: {train: {path: x}}", "model: required")])
def test_a_broken_file(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=part):
        load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the configuration .*nowhere.yaml"):
        load(tmp_path / "nowhere.yaml")


def test_the_resolved_configuration_loads_to_the_same(file: Path, tmp_path: Path) -> None:
    config = load(file, ["rollout.n=3", "optimizer.lr=1e-5"])
    config.save(tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config


def test_every_setting_is_described() -> None:
    """A field's meaning stands beside it or in its name; booleans, switches and paths need words."""

    def undescribed(section: type, prefix: str) -> list[str]:
        missing = []
        for name, info in section.model_fields.items():
            inner = info.annotation
            if hasattr(inner, "model_fields"):
                missing += undescribed(inner, f"{prefix}{name}.")
            elif inner in (bool, dict) and not info.description:
                missing.append(prefix + name)
        return missing

    assert set(undescribed(Config, "")) <= {"data.shuffle", "telemetry.tensorboard"}
