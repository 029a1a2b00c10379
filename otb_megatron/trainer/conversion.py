"""Training checkpoints and Hugging Face directories: write one from the other, and check that both compute the same.

Each command runs alone or on several ranks (`otb-megatron launch`, torchrun). A process that runs alone takes checkpoints of any layout into one of its own.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from otb_megatron.config import Config
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.bridge import find_bridge
from otb_megatron.mcore.checksums import CHECKSUMS_FILE
from otb_megatron.mcore.head import StatisticsHead
from otb_megatron.mcore.model import Model, build_model, whole_on_one_rank
from otb_megatron.mcore.parallel import Parallel, start_parallel, stop_parallel, world
from otb_megatron.mcore.shards import FullWeights, check_names, load_weights, num_local_bytes
from otb_megatron.mcore.step import evaluate
from otb_megatron.telemetry.console import count_down_bytes
from otb_megatron.trainer.batch import distribute, gather_statistics
from otb_megatron.trainer.driver import Driver, found_by_all
from otb_megatron.trainer.learner import complete_save, export_weights, restore
from otb_megatron.trainer.source import demonstration_sample, load_tokenizer, read_prompts
from otb_megatron.trainer.validate import validate_model
from otb_megatron.types import Trajectories, UserError
from otb_megatron.weights.architectures import load_model
from otb_megatron.weights.files import CHECKSUMS, Checkpoint, checksum

_COMPARED_SAMPLES = 32
_ROOM = 1.1  # times the weights: a layer's experts are copied while transformers joins them, and logits are wanted


@dataclass(frozen=True)
class Comparison:
    """What of an export `verify` has compared with its checkpoint, and found alike."""

    num_tensors: int  # by their names
    num_files: int  # with their checksums; 0 where there is no list of them
    needed_bytes: int  # of host memory for the model in transformers
    free_bytes: int
    difference: float | None = None  # the largest of a token's log-prob; None where it is not computed, for lack of memory

    @property
    def has_room(self) -> bool:
        """Whether transformers can load the model."""
        return self.needed_bytes <= self.free_bytes


def import_model(config: Config) -> Path | None:
    """Writes the weights of `model.path` as the checkpoint of step 0 in `trainer.output_dir`, in the layout of the `parallel` section.

    Training that finds it there starts from it in any layout, as it would from `model.path`, with an optimizer (and a critic) of its own.
    Each rank reads its part of the weights alone, and holds no more than that and what one parameter is joined from.

    Returns:
        The checkpoint's directory, on the rank that tells; None elsewhere.

    Raises:
        UserError: weights and configuration do not fit, the directory has a checkpoint, or the disk does not take it.
    """
    rank, world_size = world()
    with found_by_all(rank):
        hf = validate_model(config, world_size)
    root = config.trainer.output_dir / "checkpoints"
    parallel = start_parallel(config.parallel, seed=config.trainer.seed, deadline_s=config.trainer.deadline_s)
    try:
        driver = Driver(parallel)
        driver.run("looking for checkpoints", lambda: _check_empty(root))
        driver.run("comparing checksums", Checkpoint(hf.path).check)
        model = build_model(config, hf, parallel)
        progress = count_down_bytes(num_local_bytes(model), show=config.telemetry.progress and driver.is_driver)
        driver.together("loading the weights", lambda: load_weights(model, Checkpoint(hf.path), progress))
        sizes = {"policy": FullWeights(model).num_parameters}
        driver.run("making room for a checkpoint", lambda: checkpoint.begin(root, 0, sizes, weights_only=True))
        state = {"step": 0, "weights_only": True, "networks": {"policy": {"model": checkpoint.identity(hf)}}}
        complete_save(root, checkpoint.write(root, 0, {"policy": (model, None)}), state, driver, keep_last=config.checkpoint.keep_last)
        return checkpoint.latest(root) if driver.is_driver else None
    finally:
        stop_parallel()


def export(config: Config, directory: Path | None, model_dir: Path) -> bool:
    """Writes a training checkpoint as a Hugging Face model directory. What a killed export of the same checkpoint has finished is not written again.

    Returns:
        Whether this rank wrote it.
    """
    model, driver, directory = _restore(config, directory)
    try:
        identity = checksum(directory / CHECKSUMS_FILE)  # path and state are the same for other weights
        export_weights(FullWeights(model), driver, model.hf.path, model_dir, identity=identity, show_progress=config.telemetry.progress)
        return driver.is_driver
    finally:
        stop_parallel()


def verify(config: Config, directory: Path | None, model_dir: Path) -> Comparison | None:
    """Compares `model_dir` with a checkpoint: files with their checksums, config.json and tensors' names with the model's, and log-probs.

    The difference is that of a token's log-prob in Megatron and in transformers, over demonstrations of `data.train` (text they never need to
    answer well), at `rollout.temperature`. It takes the whole model in the host memory of the first rank; where that lacks, it is left out.

    Returns:
        What was compared, on the rank that compares; None on the others.

    Raises:
        UserError: the difference is above 1e-4 for float32 models or 0.1 for bfloat16 ones; a file is damaged, a tensor missing or unknown;
            config.json is unreadable or another model's; there is neither memory for log-probs nor a list of checksums.
    """
    model, driver, _ = _restore(config, directory)
    try:
        found = driver.share("the comparison of files", driver.run("checking the exported files", lambda: _check_files(model, model_dir)))
        if not found.has_room:
            return found if driver.is_driver else None
        trajectories = driver.run("reading the text to compare on", lambda: _demonstrations(config))
        batch = distribute(trajectories, config, model.parallel, driver)
        head = StatisticsHead(model.hf.vocab_size, config.rollout.temperature)
        ours = gather_statistics(batch, evaluate(model, model.wrapped_chunks(), batch.all_microbatches, head), driver)
        if ours is None or trajectories is None:
            return None
        theirs = _transformers_log_prob(model_dir, model, trajectories, config.rollout.temperature)
        difference = float((ours.log_prob - theirs).abs().max())
    finally:
        stop_parallel()
    tolerance = 1e-4 if config.model.dtype == "float32" else 0.1
    if not difference <= tolerance:
        raise UserError(f"{model_dir} differs from the checkpoint by {difference:.2e} in a log-prob (at most {tolerance} is rounding); export it again")
    return dataclasses.replace(found, difference=difference)


def _restore(config: Config, directory: Path | None) -> tuple[Model, Driver, Path]:
    rank, world_size = world()
    if world_size == 1:
        config = whole_on_one_rank(config)
    root = config.trainer.output_dir / "checkpoints"
    with found_by_all(rank):
        hf = validate_model(config, world_size)
        directory = directory or checkpoint.latest(root)
        if directory is None:
            raise UserError(f"{root} holds no checkpoint; name one with --checkpoint or set trainer.output_dir to a run that saved one")
    parallel: Parallel = start_parallel(config.parallel, seed=config.trainer.seed, deadline_s=config.trainer.deadline_s)
    model = build_model(config, hf, parallel)
    driver = Driver(parallel)
    driver.run("looking at the checkpoint", lambda: checkpoint.check_model(directory, checkpoint.read_state(directory)["networks"]["policy"]["model"], hf))
    restore(directory, {"policy": (model, None)}, driver)
    return model, driver, directory


def _check_empty(root: Path) -> None:
    if (found := checkpoint.latest(root)) is not None:
        raise UserError(f"{found} is there already; set trainer.output_dir to a directory without checkpoints")


def _check_files(model: Model, model_dir: Path) -> Comparison:
    files = Checkpoint(model_dir)
    num_files = files.check()
    _check_config(model, model_dir)
    names = check_names(model, files)
    num_bytes = sum(math.prod(files.shape(name)) for name in names) * model.config.params_dtype.itemsize
    found = Comparison(len(names), num_files, int(_ROOM * num_bytes), psutil.virtual_memory().available)
    if not found.has_room and num_files == 0:
        raise UserError(
            f"{model_dir} has no {CHECKSUMS}, and log-probs take {found.needed_bytes / 2**30:.1f} GiB of host memory, of which "
            f"{found.free_bytes / 2**30:.1f} GiB are free; export it again, or verify it on a machine with more memory"
        )
    return found


def _check_config(model: Model, model_dir: Path) -> None:
    own, exported = model.hf.identity, load_model(model_dir, "--model-dir", find_bridge).identity
    keys = sorted(own.keys() | exported.keys())
    differences = [f"{key} is {exported.get(key)!r} instead of {own.get(key)!r}" for key in keys if exported.get(key) != own.get(key)]
    if differences:
        raise UserError(f"{model_dir / 'config.json'} is not that of the checkpoint's model: {'; '.join(differences)}; export it again")


def _demonstrations(config: Config) -> Trajectories:
    tokenizer = load_tokenizer(config)
    prompts = read_prompts(config, config.data.train).prompts[:_COMPARED_SAMPLES]
    return Trajectories.from_samples([demonstration_sample(tokenizer, prompt, group) for group, prompt in enumerate(prompts)])


@torch.no_grad()
def _transformers_log_prob(model_dir: Path, model: Model, trajectories: Trajectories, temperature: float) -> Tensor:
    """[actions] log-probs, one unpadded sample at a time."""
    try:
        reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=model.config.params_dtype).eval()
    except Exception as error:  # of many kinds: what is wrong with each file has its own
        raise UserError(f"transformers cannot load {model_dir}: {type(error).__name__}: {' '.join(str(error).split())}; export it again") from error
    found = []
    bounds = zip(trajectories.token_offsets, trajectories.token_offsets[1:], trajectories.action_offsets, trajectories.action_offsets[1:], strict=False)
    for first, last, first_action, last_action in bounds:
        tokens = trajectories.tokens[first:last]
        log_prob = torch.log_softmax(reference(tokens[None]).logits[0].float() / temperature, -1)
        positions = trajectories.action_positions[first_action:last_action] - first
        found.append(log_prob[positions - 1, tokens[positions]])
    return torch.cat(found)
