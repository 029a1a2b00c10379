"""Training checkpoints and Hugging Face directories: write one from the other, and check that both compute the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.model import Model, build_model, sets_stage_layers
from otb_megatron.mcore.parallel import Parallel, start_parallel, stop_parallel, world
from otb_megatron.mcore.shards import FullWeights
from otb_megatron.mcore.step import statistics
from otb_megatron.trainer.batch import distribute, gather_statistics
from otb_megatron.trainer.driver import Driver
from otb_megatron.trainer.learner import export_weights
from otb_megatron.trainer.source import demonstration_sample, load_tokenizer, read_prompts
from otb_megatron.types import Trajectories, UserError
from otb_megatron.weights.architectures import load_model

_COMPARED_SAMPLES = 32


def export(config: Config, directory: Path | None, model_dir: Path) -> bool:
    """Writes a training checkpoint as a Hugging Face model directory. Runs alone or under torchrun; the checkpoint may come from any layout.

    Returns:
        Whether this rank wrote it.
    """
    model, driver = _restore(config, directory)
    try:
        export_weights(FullWeights(model), driver, model.hf.path, model_dir)
        return driver.is_driver
    finally:
        stop_parallel()


def verify(config: Config, directory: Path | None, model_dir: Path) -> float | None:
    """The largest difference of a token's log-prob between a checkpoint in Megatron and `model_dir` in transformers.

    None on ranks that do not compare. It is taken over demonstrations of `data.train` (text they never need to answer well), at `rollout.temperature`.

    Raises:
        UserError: if it is above 1e-4 for float32 models or 0.1 for bfloat16 ones.
    """
    model, driver = _restore(config, directory)
    try:
        trajectories = driver.run("reading the text to compare on", lambda: _demonstrations(config))
        batch = distribute(trajectories, config, model.parallel, driver)
        ours = gather_statistics(batch, statistics(model, model.wrapped_chunks(), batch.all_microbatches, config.rollout.temperature), driver)
        if ours is None or trajectories is None:
            return None
        theirs = _transformers_log_prob(model_dir, model, trajectories, config.rollout.temperature)
        difference = float((ours.log_prob - theirs).abs().max())
    finally:
        stop_parallel()
    tolerance = 1e-4 if config.model.dtype == "float32" else 0.1
    if not difference <= tolerance:
        raise UserError(f"{model_dir} differs from the checkpoint by {difference:.2e} in a log-prob (at most {tolerance} is rounding); export it again")
    return difference


def _restore(config: Config, directory: Path | None) -> tuple[Model, Driver]:
    hf = load_model(config.model.path)
    _, world_size = world()
    if world_size == 1:
        megatron = {key: value for key, value in config.megatron.items() if not sets_stage_layers(key)}
        config = config.model_copy(update={"parallel": type(config.parallel)(), "megatron": megatron})
    root = config.trainer.output_dir / "checkpoints"
    directory = directory or checkpoint.latest(root)
    if directory is None:
        raise UserError(f"{root} holds no checkpoint; name one with --checkpoint or set trainer.output_dir to a run that saved one")
    parallel: Parallel = start_parallel(config.parallel, seed=config.trainer.seed, deadline_s=config.trainer.deadline_s)
    model = build_model(config, hf, parallel)
    checkpoint.load(directory / "policy", model, optimizer=None)
    return model, Driver(parallel)


def _demonstrations(config: Config) -> Trajectories:
    tokenizer = load_tokenizer(config)
    prompts = read_prompts(config, config.data.train).prompts[:_COMPARED_SAMPLES]
    return Trajectories.from_samples([demonstration_sample(tokenizer, prompt, group) for group, prompt in enumerate(prompts)])


@torch.no_grad()
def _transformers_log_prob(model_dir: Path, model: Model, trajectories: Trajectories, temperature: float) -> Tensor:
    """[actions] log-probs, one unpadded sample at a time."""
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=model.config.params_dtype).eval()
    found = []
    bounds = zip(trajectories.token_offsets, trajectories.token_offsets[1:], trajectories.action_offsets, trajectories.action_offsets[1:], strict=False)
    for first, last, first_action, last_action in bounds:
        tokens = trajectories.tokens[first:last]
        log_prob = torch.log_softmax(reference(tokens[None]).logits[0].float() / temperature, -1)
        positions = trajectories.action_positions[first_action:last_action] - first
        found.append(log_prob[positions - 1, tokens[positions]])
    return torch.cat(found)
