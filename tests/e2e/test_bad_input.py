"""What a user can get wrong ends in one message that names the value and the remedy, exit status 2 and no traceback."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from otb_megatron import cli
from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from tests.distributed.training import record_samples, settings
from tests.models import VOCAB_SIZE, make_model


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a recording of samples, so that a run needs no engine."""
    directory = tmp_path_factory.mktemp("work")
    make_model(directory / "model", "qwen3_tied")
    record_samples(directory / "rollouts", vocab_size=VOCAB_SIZE)
    return directory


@pytest.fixture
def values(work: Path, tmp_path: Path) -> dict[str, Any]:
    found = settings(work / "model", work)
    found["trainer"]["output_dir"] = str(tmp_path / "run")
    return found


def _file(tmp_path: Path, values: dict[str, Any]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def _broken_rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    good = {"data_source": "t", "prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "1"}}
    path.write_text("\n".join([json.dumps(good), "{broken", json.dumps({"prompt": "text"}), json.dumps(good)]) + "\n")
    return str(path)


CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown key": (["rollout.temprature=1"], ["rollout.temprature", "unknown key", "'temperature'"]),
    "mistyped value": (["rollout.n=many"], ["rollout.n='many'"]),
    "heads": (["parallel.tensor_model_parallel_size=3"], ["num_attention_heads 8", "tensor_model_parallel_size 3"]),
    "world size": (["parallel.pipeline_model_parallel_size=2"], ["1 process(es) cannot hold", "--nproc-per-node"]),
    "layers": (["parallel.pipeline_model_parallel_size=3"], ["num_hidden_layers 4", "pipeline stages 3"]),
    "experts of a dense model": (["parallel.expert_model_parallel_size=2"], ["dense model"]),
    "advantage": (["algorithm.advantage=optimal_token_baselin"], ["'optimal_token_baseline'"]),
    "advantage option": (["algorithm.advantage_options.tial=hold"], ["advantage_options.tial", "'tail'"]),
    "loss": (["algorithm.loss=clipped_surogate"], ["algorithm.loss='clipped_surogate'", "'clipped_surrogate'"]),
    "aggregation of another method": (
        ["algorithm.loss=gspo"],
        ["algorithm.loss='gspo'", "algorithm.aggregation=token-mean", "set algorithm.aggregation=seq-mean-token-mean"],
    ),
    "a penalty without effect": (["algorithm.loss=kl_cov"], ["algorithm.optimizer_steps_per_rollout=1", "'kl_cov'", "set it to 2 or more"]),
    "too few responses": (["rollout.n=1"], ["rollout.n=1", "'optimal_token_baseline'", "rollout.n=2"]),
    "correction": (["algorithm.rollout_correction=truncate"], ["algorithm.rollout_correction='truncate'", "'truncated'"]),
    "correction option": (
        ["algorithm.rollout_correction=masked", "algorithm.rollout_correction_options.clip=2"],
        ["algorithm.rollout_correction_options.clip=2", "masked has no such option", "high, low"],
    ),
    "negative correction weights": (
        ["algorithm.rollout_correction=truncated", "algorithm.rollout_correction_options.clip=-1"],
        ["algorithm.rollout_correction_options.clip=-1", "greater than 0"],
    ),
    "selection option": (["algorithm.loss=clip_cov", "algorithm.loss_options.fraction=1"], ["algorithm.loss_options.fraction=1", "'selected_fraction'"]),
    "overlong buffer": (["rewards.overlong_buffer_tokens=2000"], ["rewards.overlong_buffer_tokens=2000", "rollout.max_response_tokens=1024"]),
    "adaptive KL without its target": (["algorithm.reward_kl.adaptive={}"], ["algorithm.reward_kl.adaptive.target: required"]),
    "dynamic sampling of single responses": (
        ["rollout.dynamic_sampling={}", "rollout.n=1", "algorithm.advantage=remax"],
        ["rollout.dynamic_sampling", "rollout.n=1"],
    ),
    "loss of another task": (["algorithm.loss=negative_log_likelihood"], ["does not fit `train`"]),
    "megatron key": (["megatron.recompute_granularty=full"], ["'recompute_granularity'"]),
    "megatron key that is ours": (["megatron.tensor_model_parallel_size=2"], ["set parallel.tensor_model_parallel_size instead"]),
    "megatron key of the model": (["megatron.layernorm_epsilon=0.5"], ["megatron.layernorm_epsilon=0.5", "follows from the model"]),
    "virtual stages without overlap": (
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2", "megatron.overlap_p2p_comm=false"],
        ["megatron.overlap_p2p_comm=False", "wrong gradients"],
    ),
    "router replay of a dense model": (["rollout.router_replay=true"], ["rollout.router_replay=true", "dense model"]),
    "offloading without a GPU": (["optimizer.optimizer_offload_fraction=0.5"], ["optimizer.optimizer_offload_fraction=0.5", "no CUDA device"]),
    "no model": (["model.path=nowhere"], ["model.path=nowhere", "no config.json"]),
    "no recording": (["rollout.replay_dir=nowhere"], ["rollout.replay_dir=nowhere", "rollout.save=true"]),
    "no verifier": (["rollout.replay_dir=null", "rewards.function=math_verfy"], ["rewards.function='math_verfy'", "'math_verify'"]),
    "best without held-out prompts": (["checkpoint.keep_best=true"], ["checkpoint.keep_best=true needs a held-out accuracy"]),
    "warmup": (["optimizer.lr_warmup_steps=3"], ["optimizer.lr_warmup_steps=3", "3 optimizer steps"]),
    "no data": (["data.train.path=nowhere.jsonl"], ["nowhere.jsonl"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_clear_message(case: str, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, parts = CASES[case]
    assert cli.main(["train", _file(tmp_path, values), *overrides]) == 2
    told = capsys.readouterr().err
    for part in parts:
        assert part in told
    assert "Traceback" not in told


def test_settings_of_experts_that_compute_otherwise(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, each with its reason; a recording without routed experts is found out when it is read."""
    make_model(tmp_path / "moe", "qwen3_moe")
    values["model"]["path"] = str(tmp_path / "moe")
    refused = {
        "moe_single_grouped_weight": (True, "one by one"),
        "moe_router_load_balancing_type": ("sinkhorn", "others than vLLM's"),
        "moe_expert_capacity_factor": (1.5, "drops tokens"),
        "moe_enable_routing_replay": (True, "set rollout.router_replay"),
        "moe_router_fusion": (True, "takes no recorded choice"),
    }
    overrides = [f"megatron.{key}={value}" for key, (value, _) in refused.items()]
    assert cli.main(["train", _file(tmp_path, values), "rollout.router_replay=true", *overrides]) == 2
    told = capsys.readouterr().err.splitlines()
    for key, (value, reason) in refused.items():
        (line,) = [line for line in told if f"megatron.{key}={value!r}" in line]
        assert reason in line
    assert cli.main(["train", _file(tmp_path, values), "rollout.router_replay=true"]) == 2
    assert "15 of 15 samples of step 1" in capsys.readouterr().err


def test_malformed_rows_all_at_once_with_their_lines(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", _file(tmp_path, values), f"data.train.path={_broken_rows(tmp_path)}"]) == 2
    told = capsys.readouterr().err
    assert "rows.jsonl:2" in told and "rows.jsonl:3" in told and "2 row(s)" in told


def test_a_missing_tensor_is_named(values: dict[str, Any], work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    make_model(model, "qwen3_tied")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, model / "model.safetensors")
    assert cli.main(["train", _file(tmp_path, values), f"model.path={model}"]) == 2
    told = capsys.readouterr().err
    assert "missing: model.layers.1.mlp.up_proj.weight" in told and "no parameter for: model.layers.1.mlp.extra.weight" in told


@pytest.mark.parametrize(
    ("damage", "overrides", "told"),
    [
        ({"reward": float("nan")}, [], ["sample 4 (prompt 1 of test) has the reward nan"]),
        ({"log_prob": float("inf")}, [], ["sample 4 (prompt 1 of test) has log-probs that are not finite"]),
        ({}, ["algorithm.advantage=remax"], ["algorithm.advantage='remax' needs `greedy_reward`", "recorded without"]),
        ({"log_prob": -200.0}, ["algorithm.rollout_correction=trust_region"], ["rejects all", "algorithm.rollout_correction_options"]),
    ],
    ids=["reward", "log-prob", "greedy reward", "everything rejected"],
)
def test_samples_that_cannot_be_trained_on(
    work: Path, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: dict[str, float], overrides: list[str], told: list[str]
) -> None:
    """From the recording through the loop: the run ends before its first update, and nothing is saved."""
    samples = load_rollouts(work / "rollouts", 1)
    if "reward" in damage:
        samples[4] = dataclasses.replace(samples[4], reward=damage["reward"])
    if "log_prob" in damage:
        few = samples if overrides else samples[4:5]
        for sample in few:
            wrong = dataclasses.replace(sample.response, log_probs=(damage["log_prob"],) * len(sample.response.token_ids))
            samples[samples.index(sample)] = dataclasses.replace(sample, response=wrong)
    save_rollouts(tmp_path / "rollouts", 1, samples)
    assert cli.main(["train", _file(tmp_path, values), f"rollout.replay_dir={tmp_path / 'rollouts'}", *overrides]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in told) and "Traceback" not in message
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_values_that_cannot_be_weights_are_named(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    make_model(model, "qwen3_tied")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, model / "model.safetensors")
    assert cli.main(["train", _file(tmp_path, values), f"model.path={model}"]) == 2
    told = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight" in told and "1 values that are NaN" in told and "model.norm.weight" in told and "is int8" in told


def _change(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A damage to a model: `change` of its tensors in place."""

    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, model / "model.safetensors")

    return damage


def _move_rows(tensors: dict[str, torch.Tensor]) -> None:
    """Joined, the wrong tensors have the right shape."""
    for part, num_rows in {"mlp.gate_proj": 90, "mlp.up_proj": 102, "self_attn.k_proj": 96, "self_attn.v_proj": 160}.items():
        tensors[f"model.layers.1.{part}.weight"] = torch.ones(num_rows, 64)


def _cut(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("mlp.experts.down_proj", "mlp.experts.gate_up_proj_bias"):
        tensors[f"model.layers.1.{name}"] = tensors[f"model.layers.1.{name}"][:3]


def _exceed_float32(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].double()
    tensors["model.layers.1.mlp.down_proj.weight"][3, :2] = torch.tensor([1e300, -1e300], dtype=torch.float64)


def _split(model: Path) -> None:
    """Gives the model two files and an index."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    files = {name: "one.safetensors" if ".layers.0." in name else "two.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, model / file)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _hide_a_tensor(model: Path) -> None:
    _split(model)
    save_file(load_file(model / "two.safetensors") | {"model.layers.9.extra": torch.zeros(1)}, model / "two.safetensors")


def _truncate_a_file(model: Path) -> None:
    _split(model)
    (model / "two.safetensors").write_bytes((model / "two.safetensors").read_bytes()[:-100])


def _truncate_the_index(model: Path) -> None:
    _split(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {')


def _configure(**changes: object) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return damage


def _pickle(model: Path) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()


BAD_MODELS: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "rows in the wrong tensor": (
        "qwen3_tied",
        _change(_move_rows),
        [
            "model.layers.1.mlp.gate_proj.weight has the shape [90, 64] instead of [96, 64]; ",
            "model.layers.1.mlp.up_proj.weight has the shape [102, 64] instead of [96, 64]\n",
            "model.layers.1.self_attn.k_proj.weight has the shape [96, 64] instead of [128, 64]; ",
            "model.layers.1.self_attn.v_proj.weight has the shape [160, 64] instead of [128, 64]\n",
        ],
    ),
    "experts that lack": (
        "gpt_oss_moe",
        _change(_cut),
        [
            "model.layers.1.mlp.experts.down_proj has the shape [3, 96, 64] instead of [4, 96, 64]\n",
            "gate_up_proj_bias has the shape [3, 192] instead of [4, 192]\n",
        ],
    ),
    "a tensor that the index hides": ("qwen3_tied", _hide_a_tensor, ["no parameter for: model.layers.9.extra\n"]),
    "a truncated file": ("gpt_oss_moe", _truncate_a_file, ["two.safetensors: ", "the file is truncated"]),
    "a truncated index": ("qwen3_tied", _truncate_the_index, ["cannot read ", "model.safetensors.index.json: ", "download the checkpoint again"]),
    "binary checksums": ("qwen3_tied", lambda model: (model / "XXH128SUMS").write_bytes(b"\xff\x00\n"), ["does not fit its XXH128SUMS", "export it again"]),
    "no configuration": ("qwen3_tied", lambda model: (model / "config.json").write_text("[]"), ["config.json holds a JSON array", "download the model again"]),
    "no heads": ("qwen3_tied", _configure(num_attention_heads=0, num_hidden_layers=0), ["num_hidden_layers=0, num_attention_heads=0 must be at least 1"]),
    "another hidden size": (
        "qwen3_tied",
        _configure(hidden_size=72),
        ["model.embed_tokens.weight has the shape [97, 64] instead of [97, 72]\n", "model.layers.0.self_attn.o_proj.weight has the shape [64, 256] instead of"],
    ),
    "a pickle": ("qwen3_tied", _pickle, ["but pytorch_model.bin; only safetensors are read"]),
    "numbers above the model's dtype": ("qwen3_tied", _change(_exceed_float32), ["model.layers.1.mlp.down_proj.weight: 2 values are too large for float32"]),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_model_that_cannot_be_imported(case: str, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All faults in one message, each once, and nothing is written."""
    kind, damage, parts = BAD_MODELS[case]
    make_model(tmp_path / "model", kind)
    damage(tmp_path / "model")
    capsys.readouterr()
    assert cli.main(["convert", "import", _file(tmp_path, values), f"model.path={tmp_path / 'model'}"]) == 2
    told = capsys.readouterr().err
    assert [told.count(part) for part in parts] == [1] * len(parts), told
    assert told.count("error:") == 1 and "Traceback" not in told
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("target", "part"), [("/proc", "0.00 GiB free"), ("file", "cannot write checkpoints to ")])
def test_a_target_that_cannot_be_written(
    target: str, part: str, work: Path, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As root nothing is read-only but what the kernel keeps, and a file is no directory for anyone."""
    (tmp_path / "file").touch()
    directory = tmp_path / target / "run"  # an absolute target replaces what is before it
    assert cli.main(["convert", "import", _file(tmp_path, values), f"trainer.output_dir={directory}"]) == 2
    told = capsys.readouterr().err
    assert part in told and str(directory / "checkpoints") in told and "set trainer.output_dir elsewhere" in told
    assert told.count("error:") == 1 and "Traceback" not in told


def _launch(arguments: list[str], *, preexec_fn: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "otb_megatron.cli", "launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, preexec_fn=preexec_fn)


def test_every_rank_ends_when_one_message_is_told(values: dict[str, Any], tmp_path: Path) -> None:
    started = time.monotonic()
    ended = _launch(["--nproc-per-node", "2", "train", _file(tmp_path, values), "parallel.tensor_model_parallel_size=3"])
    assert ended.returncode == 2
    assert ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr
    assert time.monotonic() - started < 60  # nearly all of it is imports


@pytest.mark.parametrize(("action", "part"), [("import", "num_attention_heads 8"), ("export", "holds no checkpoint")])
def test_every_rank_of_a_conversion_ends_when_one_message_is_told(action: str, part: str, values: dict[str, Any], tmp_path: Path) -> None:
    overrides = ["parallel.tensor_model_parallel_size=3"] if action == "import" else []
    ended = _launch(["--nproc-per-node", "2", "convert", action, _file(tmp_path, values), *overrides])
    assert ended.returncode == 2
    assert part in ended.stderr and ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr


def test_only_what_runs_on_ranks_is_launched(values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is launched takes its own arguments, checked before any rank starts."""
    path = _file(tmp_path, values)
    assert cli.main(["launch", "--nproc-per-node", "2", "plan", path]) == 2
    assert "start `otb-megatron plan` without it" in capsys.readouterr().err
    assert cli.main(["launch", "convert", "export", path, "--checkpoint", "step_3", "rollout.temprature=1"]) == 2
    assert "rollout.temprature" in capsys.readouterr().err
    for wrong, told in (([], "required: COMMAND"), (["convert", "imprt", path], "'imprt'"), (["train", path, "--checkpoint=step_3"], "--checkpoint=step_3")):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["launch", *wrong])
        assert told in capsys.readouterr().err


def test_a_fault_of_one_rank_is_told_by_it(values: dict[str, Any], tmp_path: Path) -> None:
    """A tensor of the second pipeline stage has a wrong shape: only rank 1 sees it."""
    model = tmp_path / "model"
    make_model(model, "qwen3_tied")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"] = tensors["model.layers.3.mlp.down_proj.weight"][:, :-1].contiguous()
    save_file(tensors, model / "model.safetensors")
    ended = _launch(["--nproc-per-node", "2", "train", _file(tmp_path, values), f"model.path={model}", "parallel.pipeline_model_parallel_size=2"])
    assert ended.returncode == 2
    assert "rank 1: error:" in ended.stderr and "model.layers.3.mlp.down_proj.weight" in ended.stderr
    assert ended.stderr.count("error:") == 1 and "Traceback" not in ended.stderr


def test_a_full_disk_keeps_the_previous_checkpoint(values: dict[str, Any], tmp_path: Path) -> None:
    """The limit on the size of a file makes the second checkpoint's writer fail as a full disk does, after part of it was written."""
    values["checkpoint"] = {"interval": 1}
    path = _file(tmp_path, values)
    checkpoints = Path(values["trainer"]["output_dir"]) / "checkpoints"
    assert _launch(["--nproc-per-node", "2", "train", path, "parallel.tensor_model_parallel_size=2", "trainer.num_steps=1"]).returncode == 0
    assert (checkpoints / "latest").read_text() == "step_00000001\n"
    limit = 64 * 1024
    for in_background in (False, True):
        ended = _launch(
            ["--nproc-per-node", "2", "train", path, "parallel.tensor_model_parallel_size=2", "trainer.num_steps=2", f"checkpoint.async_save={in_background}"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert ended.returncode == 2
        assert "cannot write the checkpoint" in ended.stderr and "step_00000001 is still the latest" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert (checkpoints / "latest").read_text() == "step_00000001\n"
        assert sorted(item.name for item in checkpoints.iterdir()) == ["latest", "step_00000001"]


def test_a_disk_without_space_is_refused_before_writing(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("otb_megatron.mcore.checkpoint.shutil.disk_usage", lambda path: usage._replace(free=1000))
    assert cli.main(["train", _file(tmp_path, values)]) == 2
    assert "a checkpoint needs about" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture(scope="module")
def saved(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of a run of two steps with a checkpoint after each."""
    directory = tmp_path_factory.mktemp("saved")
    values = settings(work / "model", work, trainer={"output_dir": str(directory / "run"), "num_steps": 2}, checkpoint={"interval": 1})
    assert cli.main(["train", _file(directory, values)]) == 0
    return directory / "run"


def _flip_a_bit(directory: Path) -> None:
    path = directory / "policy" / "__0_0.distcp"
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def _set_format(directory: Path) -> None:
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(state | {"format_version": 99}))


def _forget_networks(directory: Path) -> None:
    state = json.loads((directory / "state.json").read_text())
    del state["networks"]
    (directory / "state.json").write_text(json.dumps(state))


def _truncate(directory: Path) -> None:
    path = directory / "policy" / ".metadata"
    path.write_bytes(path.read_bytes()[:100])


DAMAGED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a changed bit": (_flip_a_bit, ["the contents of policy/__0_0.distcp have changed", "step_* directory"]),
    "a truncated file": (_truncate, ["policy/.metadata has 100 bytes instead of"]),
    "a lost file": (lambda directory: (directory / "policy" / "metadata.json").unlink(), ["policy/metadata.json is missing"]),
    "a newer format": (_set_format, ["has format 99, and this version reads format 1", "update"]),
    "a state that lacks": (_forget_networks, ["step_00000002/state.json is damaged", "networks without the model", "another checkpoint"]),
    "a lost state": (lambda directory: (directory / "state.json").unlink(), ["step_00000002, which is not a complete checkpoint"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_continues(
    name: str, saved: Path, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, told = DAMAGED[name]
    run = Path(values["trainer"]["output_dir"])
    shutil.copytree(saved, run)
    damage(run / "checkpoints" / "step_00000002")
    path = _file(tmp_path, values)
    assert cli.main(["train", path]) == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1 and all(part in error for part in told), error
    (run / "checkpoints" / "latest").write_text("step_00000001\n")
    assert cli.main(["train", path, "trainer.num_steps=2"]) == 0


@pytest.mark.parametrize(("command", "resume"), [("train", "auto"), ("train", "never"), ("convert import", "auto"), ("convert export", "auto")])
def test_checkpoints_without_the_pointer_are_refused_and_stay(
    command: str, resume: str, saved: Path, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = Path(values["trainer"]["output_dir"]) / "checkpoints"
    shutil.copytree(saved / "checkpoints", checkpoints, ignore=shutil.ignore_patterns("latest"))
    assert cli.main([*command.split(), _file(tmp_path, values), f"trainer.resume={resume}"]) == 2
    told = capsys.readouterr().err
    assert f"{checkpoints} holds step_00000001, step_00000002, but no file `latest`" in told and "Traceback" not in told
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_00000001", "step_00000002"]


def test_a_checkpoint_of_another_model_is_refused(saved: Path, work: Path, values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved, values["trainer"]["output_dir"])
    shutil.copytree(work / "model", tmp_path / "model")
    config = json.loads((work / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert cli.main(["train", _file(tmp_path, values), f"model.path={tmp_path / 'model'}"]) == 2
    assert f"of another model, {work / 'model'}" in (error := capsys.readouterr().err) and "rms_norm_eps was 1e-06 and is now 0.5" in error
