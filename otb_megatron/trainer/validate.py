"""What can be known to be wrong before anything starts: checks across the configuration, the model, the algorithms and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from otb_megatron.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, check_fields, check_loss_fields, check_options, choose, needs_critic
from otb_megatron.config import Config, CriticConfig, OptimizerConfig
from otb_megatron.mcore import checkpoint
from otb_megatron.mcore.bridge import find_bridge
from otb_megatron.mcore.model import check_divisible, transformer_config
from otb_megatron.mcore.parallel import data_parallel_size
from otb_megatron.rewards.registry import resolve
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import HuggingFaceModel, load_model

Task = Literal["train", "sft"]


def validate(config: Config, task: Task, world_size: int) -> HuggingFaceModel:
    """Checks that the run can start.

    Args:
        task: "train" learns from rewards of sampled responses, "sft" from demonstrations.
        world_size: processes of the run.

    Returns:
        The model that `config.model.path` names.

    Raises:
        UserError: all faults at once, each with its remedy.
    """
    faults: list[str] = []
    model = _load_model(faults, config, world_size)
    if model is not None:
        collect(faults, lambda: check_router_replay(config, model))
    collect(faults, lambda: _check_critic(config, task, model))
    collect(faults, lambda: _check_loss(config, task))
    if task == "sft":
        collect(faults, lambda: _check_supervised(config))
    else:
        collect(faults, lambda: _check_advantage(config))
        collect(faults, lambda: _check_correction(config))
        collect(faults, lambda: _check_sampling(config))
        collect(faults, lambda: check_replay_dir(config))
        if config.rollout.replay_dir is None:
            collect(faults, lambda: resolve(config.rewards.function, config.rewards.options))
            longest_s = max(config.rollout.start_timeout_s, config.rollout.generate_timeout_s, config.rollout.weight_transfer_timeout_s)
            if config.trainer.deadline_s <= longest_s:
                faults.append(
                    f"trainer.deadline_s={config.trainer.deadline_s:g} must be above the deadlines of rollout ({longest_s:g} s), or the ranks give up on "
                    "a driver that may still wait for the engines"
                )
    for network in trained_networks(config, task).values():
        collect(faults, lambda: _check_optimizer(network))  # noqa: B023
    if config.algorithm.optimizer_steps_per_rollout > config.data.prompts_per_step:
        faults.append(
            f"algorithm.optimizer_steps_per_rollout={config.algorithm.optimizer_steps_per_rollout} cannot share data.prompts_per_step="
            f"{config.data.prompts_per_step} prompts; a prompt's responses stay together"
        )
    if config.checkpoint.keep_best and (config.data.validation is None or task == "sft" or config.rollout.replay_dir is not None):
        faults.append("checkpoint.keep_best=true needs a held-out accuracy, which only `train` with data.validation and without rollout.replay_dir measures")
    if config.trainer.resume == "never" and collect(faults, lambda: checkpoint.latest(config.trainer.output_dir / "checkpoints")):
        faults.append(f"trainer.resume=never, but {config.trainer.output_dir}/checkpoints holds one; set trainer.resume=auto or another trainer.output_dir")
    if faults:
        raise UserError("\n".join(faults))
    assert model is not None
    return model


def validate_model(config: Config, world_size: int) -> HuggingFaceModel:
    """Checks that the processes can hold the model that `config.model.path` names, and returns it. What a conversion needs of `validate`.

    Raises:
        UserError: all faults at once, each with its remedy.
    """
    faults: list[str] = []
    model = _load_model(faults, config, world_size)
    if faults:
        raise UserError("\n".join(faults))
    assert model is not None
    return model


def _load_model(faults: list[str], config: Config, world_size: int) -> HuggingFaceModel | None:
    model: HuggingFaceModel | None = collect(faults, lambda: load_model(config.model.path, find_bridge=find_bridge))
    collect(faults, lambda: data_parallel_size(config.parallel, world_size))
    if model is not None:
        collect(faults, lambda: _check_model(config, model))
    return model


@dataclass(frozen=True)
class TrainedNetwork:
    """How a network is trained."""

    section: str  # its optimizer's place in the configuration
    optimizer: OptimizerConfig
    num_steps: int  # optimizer steps of the whole run


def trained_networks(config: Config, task: Task) -> dict[str, TrainedNetwork]:
    """What the run trains: `policy`, and `critic` where the estimator needs values."""
    rollouts, per_rollout = config.trainer.num_steps, config.algorithm.optimizer_steps_per_rollout
    networks = {"policy": TrainedNetwork("optimizer", config.optimizer, (rollouts - config.critic.warmup_steps) * per_rollout)}
    if task == "train" and needs_critic(config.algorithm.advantage):
        networks["critic"] = TrainedNetwork("critic.optimizer", config.critic.optimizer, rollouts * per_rollout)
    return networks


def load_critic(config: Config) -> HuggingFaceModel:
    """The model that the critic starts from. Raises what `load_model` raises."""
    return load_model(config.critic.path or config.model.path, "critic.path" if config.critic.path else "model.path", find_bridge)


def check_router_replay(config: Config, model: HuggingFaceModel) -> None:
    """Refuses recorded experts for a model without experts."""
    if config.rollout.router_replay and not model.is_moe:
        raise UserError(f"rollout.router_replay=true, but {model.path} is a dense model, which routes nothing; leave it out")


def check_replay_dir(config: Config) -> None:
    """Refuses a recording that is not there."""
    directory = config.rollout.replay_dir
    if directory is not None and not directory.is_dir():
        raise UserError(f"rollout.replay_dir={directory}: no such directory; a run with rollout.save=true writes <output_dir>/rollouts")


def collect[T](faults: list[str], check: object) -> T | None:
    """Runs one check and keeps its message."""
    try:
        return check()  # type: ignore[operator]
    except UserError as error:
        faults.append(str(error))
        return None


def _check_model(config: Config, model: HuggingFaceModel) -> None:
    # Megatron-Core finds what does not divide as well, but says less about it.
    check_divisible(config, model)
    transformer_config(config, model)
    if model.is_moe and config.parallel.tensor_model_parallel_size > 1 and not config.parallel.sequence_parallel:
        raise UserError(f"{model.path}: an MoE model with parallel.tensor_model_parallel_size > 1 needs parallel.sequence_parallel=true (Megatron-Core's rule)")


def _check_critic(config: Config, task: Task, policy: HuggingFaceModel | None) -> None:
    if "critic" not in trained_networks(config, task):
        unused = [f"critic.{name}" for name in CriticConfig.model_fields if getattr(config.critic, name) != getattr(CriticConfig(), name)]
        if unused:
            reason = f"algorithm.advantage={config.algorithm.advantage} needs no values" if task == "train" else f"`{task}` estimates no advantages"
            raise UserError(f"{', '.join(unused)}: this run has no critic, because {reason}; leave the section out, or set e.g. algorithm.advantage=gae")
        return
    if config.critic.warmup_steps >= config.trainer.num_steps:
        raise UserError(f"critic.warmup_steps={config.critic.warmup_steps} leaves the policy none of trainer.num_steps={config.trainer.num_steps} steps")
    if config.critic.path is None:
        return
    critic = load_critic(config)
    if policy is not None and critic.vocab_size != policy.vocab_size:
        raise UserError(
            f"critic.path={critic.path} has a vocabulary of {critic.vocab_size} and model.path={policy.path} one of {policy.vocab_size}; "
            "the critic reads the policy's tokens, so give one with the same tokenizer"
        )
    _check_model(config, critic)


def _check_optimizer(network: TrainedNetwork) -> None:
    section, settings = network.section, network.optimizer
    faults = []
    if settings.optimizer_offload_fraction and not torch.cuda.is_available():
        faults.append(
            f"{section}.optimizer_offload_fraction={settings.optimizer_offload_fraction:g}: this machine has no CUDA device to offload from, and "
            "Megatron-Core's offloading fails without one; leave it out"
        )
    if settings.min_lr > settings.lr:
        faults.append(f"{section}.min_lr={settings.min_lr} is above {section}.lr={settings.lr}")
    decay_steps = settings.lr_decay_steps or network.num_steps
    if settings.lr_warmup_steps >= decay_steps > 0:
        faults.append(f"{section}.lr_warmup_steps={settings.lr_warmup_steps} does not end before the {decay_steps} optimizer steps of the schedule do")
    if faults:
        raise UserError("\n".join(faults))


def _check_loss(config: Config, task: Task) -> None:
    algorithm = config.algorithm
    loss = choose("loss", algorithm.loss, LOSSES)
    check_options("loss", algorithm.loss, loss.functions, algorithm.loss_options)
    check_loss_fields(algorithm.loss, {"offsets", "selected", "positive"})
    supervised = algorithm.loss == "negative_log_likelihood"
    if supervised != (task == "sft"):
        usable = "negative_log_likelihood" if task == "sft" else "a loss that uses advantages, e.g. clipped_surrogate"
        raise UserError(f"algorithm.loss={algorithm.loss!r} does not fit `{task}`; set {usable}")
    if loss.aggregation not in (None, algorithm.aggregation):
        raise UserError(
            f"algorithm.loss={algorithm.loss!r} is another method under algorithm.aggregation={algorithm.aggregation}: set "
            f"algorithm.aggregation={loss.aggregation}, which its paper derives it for"
        )
    if algorithm.optimizer_steps_per_rollout < loss.min_optimizer_steps:
        raise UserError(
            f"algorithm.optimizer_steps_per_rollout={algorithm.optimizer_steps_per_rollout}: what algorithm.loss={algorithm.loss!r} adds has no gradient in "
            f"the first optimizer step after a rollout, so it would change nothing; set it to {loss.min_optimizer_steps} or more, or choose another loss"
        )
    if "offsets" in loss.required and config.parallel.context_parallel_size > 1:
        raise UserError(
            f"algorithm.loss={algorithm.loss!r} needs whole sequences, which parallel.context_parallel_size={config.parallel.context_parallel_size} "
            "cuts; set it to 1 or choose a token-level loss"
        )


def _check_advantage(config: Config) -> None:
    algorithm = config.algorithm
    estimator = choose("advantage", algorithm.advantage, ADVANTAGES)
    check_options("advantage", algorithm.advantage, [estimator.function], algorithm.advantage_options)
    check_fields(algorithm.advantage, {"energy", "values", "greedy_reward"})
    if config.rollout.n < estimator.min_group:
        raise UserError(
            f"rollout.n={config.rollout.n}: algorithm.advantage={algorithm.advantage!r} compares the responses to one prompt with each other and has no "
            f"baseline below rollout.n={estimator.min_group}; raise it, or choose remax or reinforce_plus_plus, which need no second response"
        )


def _check_correction(config: Config) -> None:
    name = config.algorithm.rollout_correction
    check_options("rollout_correction", name, [choose("rollout_correction", name, CORRECTIONS)], config.algorithm.rollout_correction_options)


def _check_sampling(config: Config) -> None:
    faults = []
    if config.rollout.dynamic_sampling is not None and config.rollout.n < 2:
        faults.append(f"rollout.dynamic_sampling keeps prompts whose responses differ in reward, which one response (rollout.n={config.rollout.n}) cannot")
    buffer_tokens, longest = config.rewards.overlong_buffer_tokens, config.rollout.max_response_tokens
    if buffer_tokens is not None and buffer_tokens > longest:
        faults.append(f"rewards.overlong_buffer_tokens={buffer_tokens} reaches below a response of no tokens; at most rollout.max_response_tokens={longest}")
    if faults:
        raise UserError("\n".join(faults))


def _check_supervised(config: Config) -> None:
    algorithm = config.algorithm
    used = {
        "algorithm.kl_coef": algorithm.kl_coef > 0,
        "algorithm.reward_kl": algorithm.reward_kl is not None,
        "algorithm.rollout_correction": algorithm.rollout_correction != "none",
        "algorithm.whiten_advantages": algorithm.whiten_advantages,
        "rewards.overlong_buffer_tokens": config.rewards.overlong_buffer_tokens is not None,
        "rollout.dynamic_sampling": config.rollout.dynamic_sampling is not None,
        "rollout.router_replay": config.rollout.router_replay,
    }
    refuse_used(used, "sft")


def refuse_used(used: Mapping[str, bool], command: str) -> None:
    """Raises a UserError that names the settings which are used and which are no part of `command`."""
    if any(used.values()):
        raise UserError(f"{', '.join(name for name, is_used in used.items() if is_used)}: no part of `{command}`; leave it out")
