"""The critic: its values, gradients and weights by hand, against transformers, in every kind of layout, and over a resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForTokenClassification

from otb_megatron.rollout.recording import load_rollouts, save_rollouts
from otb_megatron.types import Prompt, Response, Sample, Trajectories
from tests.distributed.training import NUM_STEPS, Outcome, largest_difference, record_samples, settings, train
from tests.models import CONFIGS, VOCAB_SIZE, make_model

OPTIMIZER = {"lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1, "clip_grad": 0.5}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tp2": ("qwen3_tied", 2, dict(tensor_model_parallel_size=2)),
    "tp2_sp": ("qwen3_tied", 2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2": ("qwen3_tied", 2, dict(pipeline_model_parallel_size=2)),
    "pp2_vpp2": ("qwen3_tied", 2, dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)),
    "cp2": ("qwen3_tied", 2, dict(context_parallel_size=2)),
    "dp2": ("qwen3_tied", 2, dict()),
    "tp2_sp_ep2": ("qwen3_moe", 2, dict(tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2)),
}


def _settings(work: Path, output_dir: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """PPO from `work`/rollouts: the policy of `work`/model, the critic of `work`/critic where that is there."""
    path = {"path": str(work / "critic")} if (work / "critic").exists() else {}
    values = settings(work / "model", work, algorithm={"advantage": "gae"}, critic={"optimizer": OPTIMIZER, **path})
    values["trainer"]["output_dir"] = str(output_dir)
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


def _make_critic(directory: Path, kind: str) -> None:
    """A critic as a token classifier of transformers, of other weights than the policy and with a value head that is not zero."""
    make_model(directory, kind, seed=1)
    torch.manual_seed(2)
    tensors = {name: tensor for name, tensor in load_file(directory / "model.safetensors").items() if name != "lm_head.weight"}
    hidden_size = CONFIGS[kind].hidden_size
    save_file(tensors | {"score.weight": torch.randn(1, hidden_size) / hidden_size**0.5, "score.bias": torch.tensor([0.3])}, directory / "model.safetensors")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Outcome]]:
    """Per model: its directory, and what one process computes there."""
    found = {}
    for kind in ("qwen3_tied", "qwen3_moe"):
        work = tmp_path_factory.mktemp(kind)
        make_model(work / "model", kind)
        _make_critic(work / "critic", kind)
        record_samples(work / "rollouts", vocab_size=VOCAB_SIZE)
        found[kind] = (work, train(_settings(work, work / "run"), 1))
    return found


def test_the_value_of_an_action_is_that_of_the_state_before_it(tmp_path: Path) -> None:
    """Hand-worked from the tokens to the loss.

    The layers are made to add nothing, so a position's hidden state is the norm of its own token's embedding: +1 in the first t of 64 entries
    and -1 in the others has rms 1. A value head of 1/64 everywhere and a bias of 0.5 gives token t the value (2 t - 64) / 64 + 0.5: 0.125 for
    20, 0.4375 for 30 and 0.75 for 40.

    Prompt 10, 20; actions 30 and 40. The state before action 30 ends in 20, that before 40 in 30: V = (0.125, 0.4375), and 0.75 is no
    action's value. With a reward of 1 at the end, discount 1 and lambda 0.5: delta = (0.3125, 0.5625), A = (0.3125 + 0.28125, 0.5625), and
    the critic's targets V + A = (0.71875, 1). The loss is the mean of A^2 / 2 = (0.17627 + 0.15820) / 2, the explained variance
    1 - Var(A) / Var(V + A) = 1 - (0.03125 / 0.28125)^2.
    """
    make_model(tmp_path / "model", "qwen3_tied")
    _make_critic(tmp_path / "critic", "qwen3_tied")
    tensors = load_file(tmp_path / "critic" / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = torch.where(torch.arange(64) < torch.arange(VOCAB_SIZE)[:, None], 1.0, -1.0)
    tensors["model.norm.weight"].fill_(1.0)
    tensors |= {"score.weight": torch.full((1, 64), 1 / 64), "score.bias": torch.tensor([0.5])}
    save_file(tensors, tmp_path / "critic" / "model.safetensors")
    prompt = Prompt(0, "test", (), (10, 20), "", {})
    save_rollouts(tmp_path / "rollouts", 1, [Sample(prompt, Response((30, 40), (-1.0, -1.0), "", "stop", 0), 0, 1.0)])
    values = _settings(tmp_path, tmp_path / "run", trainer={"num_steps": 1, "output_dir": str(tmp_path / "run"), "max_tokens_per_microbatch": 64})
    values["algorithm"]["advantage_options"] = {"lam": 0.5, "whitened": False}
    values["critic"]["lam"] = 0.5
    outcome = train(values, 1)
    assert outcome.values[0].tolist() == pytest.approx([0.125, 0.4375], abs=1e-5)
    assert outcome.advantages[0].tolist() == pytest.approx([0.59375, 0.5625], abs=1e-5)
    metrics = outcome.metrics[0]
    assert metrics["critic/values"] == pytest.approx(0.28125, abs=1e-5)
    assert metrics["critic/returns"] == pytest.approx((0.71875 + 1) / 2, abs=1e-5)
    assert metrics["critic/loss"] == pytest.approx((0.59375**2 + 0.5625**2) / 4, abs=1e-5)
    assert metrics["critic/explained_variance"] == pytest.approx(1 - (0.03125 / 0.28125) ** 2, abs=1e-4)
    assert metrics["critic/clip_fraction"] == 0  # one update a rollout: no value has moved yet


def _adam_of_transformers(critic_dir: Path, rollouts: Path) -> tuple[list[Tensor], list[float], dict[str, Tensor]]:
    """Values and gradient norm of each step and the weights after them: one unpadded sample at a time, in float64, with torch's AdamW.

    The returns are the rewards themselves (lambda 1, paid at the last action), and no value moves before its update, so nothing is clipped.
    """
    model = AutoModelForTokenClassification.from_pretrained(critic_dir, num_labels=1, dtype=torch.float64, experts_implementation="eager").eval()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], eps=OPTIMIZER["adam_eps"])
    values, norms = [], []
    for step in range(1, NUM_STEPS + 1):
        trajectories = Trajectories.from_samples(load_rollouts(rollouts, step))
        found, loss = [], torch.zeros((), dtype=torch.float64)
        for sample in range(trajectories.num_samples):
            first, last = trajectories.token_offsets[sample], trajectories.token_offsets[sample + 1]
            actions = slice(trajectories.action_offsets[sample], trajectories.action_offsets[sample + 1])
            before = trajectories.action_positions[actions] - first - 1
            found.append(model(trajectories.tokens[first:last][None]).logits[0, before, 0])
            loss = loss + (found[-1] - trajectories.rewards[actions].sum()).square().sum() / 2
        optimizer.zero_grad()
        (loss / trajectories.num_actions).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_grad"])))
        optimizer.step()
        values.append(torch.cat(found).detach())
    model.save_pretrained(critic_dir.parent / "trained")
    return values, norms, load_file(critic_dir.parent / "trained" / "model.safetensors")


@pytest.mark.parametrize("kind", ["qwen3_tied", "qwen3_moe"])
def test_one_process_trains_as_transformers_does(references: dict[str, tuple[Path, Outcome]], kind: str) -> None:
    work, outcome = references[kind]
    values, norms, weights = _adam_of_transformers(work / "critic", work / "rollouts")
    for step in range(NUM_STEPS):
        assert float((outcome.values[step] - values[step]).abs().max()) < 1e-4
        assert outcome.metrics[step]["critic/grad_norm"] == pytest.approx(norms[step], rel=1e-4)
    assert largest_difference({name: tensor.double() for name, tensor in outcome.critic.items()}, weights) < 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_process(references: dict[str, tuple[Path, Outcome]], tmp_path: Path, layout: str) -> None:
    """Values, gradient norm and metrics of three steps, and the weights after them, within 1e-5."""
    kind, world_size, parallel = LAYOUTS[layout]
    work, expected = references[kind]
    outcome = train(_settings(work, tmp_path / "run", parallel=parallel), world_size)
    for got, want in zip(outcome.values, expected.values, strict=True):
        assert got.shape == want.shape and float((got - want).abs().max()) < 1e-5
    for got, want in zip(outcome.metrics, expected.metrics, strict=True):
        for name in ("critic/loss", "critic/explained_variance", "critic/values", "critic/returns", "critic/grad_norm", "advantages/std"):
            # Values have both signs, so their mean is compared as they are.
            assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5 if name == "critic/values" else 1e-6), name
    assert largest_difference(outcome.critic, expected.critic) < 1e-5
    assert largest_difference(outcome.weights, expected.weights) < 1e-5


def test_bfloat16_differs_by_its_rounding(references: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> None:
    """The value head's product is float32, so what remains at TP2 with SP against one process is the decoder's rounding (2^-8 = 0.4 %)."""
    work, _ = references["qwen3_tied"]
    bfloat16 = {"model": {"path": str(work / "model"), "dtype": "bfloat16", "make_vocab_size_divisible_by": 8}}
    one = train(_settings(work, tmp_path / "one", **bfloat16), 1)
    two = train(_settings(work, tmp_path / "two", **bfloat16, parallel=LAYOUTS["tp2_sp"][2]), 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in two.critic.values())
    assert one.values[0].unique().numel() > 0.9 * one.values[0].numel()  # more than 8 bits of value
    assert float((one.values[0] - two.values[0]).abs().mean()) < 0.03 * float(one.values[0].std())
    assert two.metrics[0]["critic/loss"] == pytest.approx(one.metrics[0]["critic/loss"], rel=0.02)


def test_resume_is_bit_for_bit_and_crosses_layouts(references: dict[str, tuple[Path, Outcome]], tmp_path: Path) -> None:
    """Stopped after two of three steps at TP2 with SP: continued there it equals the uninterrupted run exactly, at PP2 within rounding."""
    work, _ = references["qwen3_tied"]

    def run(name: str, num_steps: int, parallel: dict[str, Any]) -> Outcome:
        values = _settings(work, tmp_path / name, parallel=parallel, checkpoint={"keep_last": 10})
        values["trainer"]["num_steps"] = num_steps
        for optimizer in (values["optimizer"], values["critic"]["optimizer"]):
            optimizer |= {"lr_decay_style": "linear", "lr_decay_steps": 10}
        return train(values, 2)

    tp2_sp = LAYOUTS["tp2_sp"][2]
    whole = run("whole", NUM_STEPS, tp2_sp)
    run("stopped", NUM_STEPS - 1, tp2_sp)
    for name in ("same", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "checkpoints" / "latest").write_text(f"step_{NUM_STEPS - 1:08d}\n")
        (tmp_path / name / "checkpoints" / f"step_{NUM_STEPS - 1:08d}").symlink_to(tmp_path / "stopped" / "checkpoints" / f"step_{NUM_STEPS - 1:08d}")
    same = run("same", NUM_STEPS, tp2_sp)
    assert all(torch.equal(same.critic[name], tensor) for name, tensor in whole.critic.items())
    assert all(torch.equal(same.weights[name], tensor) for name, tensor in whole.weights.items())
    assert torch.equal(same.values[0], whole.values[-1])
    timeless = [{name: value for name, value in step.items() if not name.startswith("time/")} for step in (same.metrics[0], whole.metrics[-1])]
    assert timeless[0] == timeless[1]
    other = run("other", NUM_STEPS, LAYOUTS["pp2"][2])
    assert largest_difference(other.critic, whole.critic) < 1e-5
    assert other.metrics[0]["critic/lr"] == whole.metrics[-1]["critic/lr"] == pytest.approx(0.7e-2)  # the third of ten steps down from 1e-2


@pytest.mark.parametrize("distributed", [True, False])
def test_a_save_in_the_warm_up_continues_bit_for_bit(references: dict[str, tuple[Path, Outcome]], tmp_path: Path, distributed: bool) -> None:
    """Continued after one of two steps of warm-up, when the policy's Adam has never stepped and the critic's once."""
    work, _ = references["qwen3_tied"]

    def run(name: str) -> Outcome:
        values = _settings(work, tmp_path / name, checkpoint={"interval": 1, "keep_last": 10})
        values["critic"] |= {"warmup_steps": 2}
        for optimizer in (values["optimizer"], values["critic"]["optimizer"]):
            optimizer |= {"use_distributed_optimizer": distributed}
        return train(values, 1)

    whole = run("whole")
    (tmp_path / "resumed" / "checkpoints").mkdir(parents=True)
    (tmp_path / "resumed" / "checkpoints" / "latest").write_text("step_00000001\n")
    (tmp_path / "resumed" / "checkpoints" / "step_00000001").symlink_to(tmp_path / "whole" / "checkpoints" / "step_00000001")
    resumed = run("resumed")
    assert ["optimizer/lr" in step for step in resumed.metrics] == [False, True]
    assert all(torch.equal(resumed.critic[name], tensor) for name, tensor in whole.critic.items())
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())


def _record_known_values(directory: Path, num_steps: int) -> None:
    """Prompts whose last token says the reward: token 10 pays 1, 11 pays 0. Responses are random, so the prompt alone is worth something."""
    draw = random.Random(0)
    for step in range(1, num_steps + 1):
        samples = []
        for group in range(16):
            pays = draw.random() < 0.5
            prompt = Prompt(group, "test", (), (draw.randrange(20, VOCAB_SIZE), 10 if pays else 11), "", {})
            tokens = tuple(draw.randrange(20, VOCAB_SIZE) for _ in range(draw.randint(1, 6)))
            samples.append(Sample(prompt, Response(tokens, (-1.0,) * len(tokens), "", "stop", 0), group, float(pays)))
        save_rollouts(directory, step, samples)


def test_the_critic_learns_a_known_value_function_while_the_policy_waits(tmp_path: Path) -> None:
    """Each step is measured before it is trained on, and no two are alike: what rises is what the critic knows of new samples.

    A constant explains nothing (0) and the true values everything (1). From a value head of zero the first step is exactly 0. The policy
    waits through the warm-up of all steps but the last, then takes the first of its own optimizer steps.
    """
    num_steps = 40
    model = make_model(tmp_path / "model", "qwen3_tied")
    _record_known_values(tmp_path / "rollouts", num_steps)
    values = _settings(tmp_path, tmp_path / "run", checkpoint={"interval": num_steps - 1, "keep_last": 2})
    values["trainer"] |= {"num_steps": num_steps, "max_tokens_per_microbatch": 512}
    values["rollout"]["n"] = 1
    values["optimizer"] |= {"lr_decay_style": "linear"}
    values["critic"] |= {"optimizer": {"lr": 3e-3, "weight_decay": 0.0}, "warmup_steps": num_steps - 1}
    outcome = train(values, 1)
    explained = [step["critic/explained_variance"] for step in outcome.metrics]
    assert explained[0] == pytest.approx(0.0, abs=1e-6) and outcome.metrics[0]["critic/values"] == 0.0
    assert sum(explained[:3]) / 3 < 0.4 and sum(explained[-5:]) / 5 > 0.8, explained
    assert ["optimizer/lr" in step for step in outcome.metrics] == [False] * (num_steps - 1) + [True]
    # One optimizer step in the policy's whole run: its linear schedule has ended at once, at min_lr = 0, and no weight moved.
    assert outcome.metrics[-1]["optimizer/lr"] == 0.0 and outcome.metrics[-1]["optimizer/grad_norm"] > 0
    assert all(torch.equal(outcome.weights[name], tensor) for name, tensor in model.state_dict().items() if name in outcome.weights)
