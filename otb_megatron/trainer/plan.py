"""What a run would do, in words and numbers, without starting it."""

from __future__ import annotations

import math

from otb_megatron.config import Config, OptimizerConfig
from otb_megatron.mcore.parallel import data_parallel_size
from otb_megatron.trainer.validate import load_critic, trained_networks, validate
from otb_megatron.weights.architectures import HuggingFaceModel
from otb_megatron.weights.files import Checkpoint
from otb_megatron.weights.rules import Rule


def describe(config: Config, world_size: int) -> str:
    """The layout of the ranks, the model's size and a lower bound of the memory that weights and optimizer take on a rank.

    Raises:
        UserError: what `validate` finds.
    """
    task = "sft" if config.algorithm.loss == "negative_log_likelihood" else "train"
    hf = validate(config, task, world_size)
    parallel, rollout = config.parallel, config.rollout
    tp = parallel.tensor_model_parallel_size
    dp = data_parallel_size(parallel, world_size)
    padded = hf.padded_vocab_size(tp, config.model.make_vocab_size_divisible_by)
    models = {"policy": (hf, hf.rules(padded))}
    networks = trained_networks(config, task)
    if "critic" in networks:
        critic = load_critic(config)
        models["critic"] = (critic, critic.critic_rules(padded))
    sizes = {name: _sizes(model, rules) for name, (model, rules) in models.items()}
    resident = sum(_resident_bytes(sizes[name], config, networks[name].optimizer, dp) for name in models)
    samples = config.data.prompts_per_step * (config.rollout.n if task == "train" else 1)
    rows = [
        ("task", task),
        *((name, _described(model, sizes[name], config)) for name, (model, _) in models.items()),
        ("ranks", f"{world_size} = TP {tp} x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"),
        ("experts", f"EP {parallel.expert_model_parallel_size} x expert TP {parallel.expert_tensor_parallel_size}"),
        ("vocabulary", f"{hf.vocab_size}, padded to {padded}, {padded // tp} a rank"),
        ("weights, gradients, optimizer", f"{resident / 2**30:.2f} GiB a rank at least; activations come on top"),
        ("samples a step", f"{samples} ({config.data.prompts_per_step} prompts x {samples // config.data.prompts_per_step})"),
        ("optimizer steps", ", ".join(f"{network.num_steps} of the {name}" for name, network in networks.items())),
        ("writes to", str(config.trainer.output_dir)),
    ]
    if task == "train":
        place = [name for name, _ in rows].index("samples a step")
        rows.insert(place, ("advantage and loss", f"{config.algorithm.advantage}, {config.algorithm.loss} ({config.algorithm.aggregation})"))
        rows.insert(place + 1, ("rollout", f"{rollout.num_engines} vLLM engine(s) x TP {rollout.tensor_parallel_size}, temperature {rollout.temperature}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _described(model: HuggingFaceModel, sizes: tuple[int, int], config: Config) -> str:
    return f"{model.path} ({model.config.model_type}, {sum(sizes) / 1e6:.2f} M parameters, {config.model.dtype})"


def _sizes(model: HuggingFaceModel, rules: tuple[Rule, ...]) -> tuple[int, int]:
    """(parameters outside experts, parameters of experts) of the whole model, without a value head that the checkpoint lacks."""
    checkpoint = Checkpoint(model.path)
    found = {"tensor": 0, "expert": 0}
    for name, group in {name: rule.group for rule in rules for name in rule.hf if name in checkpoint.names}.items():
        found[group] += math.prod(checkpoint.shape(name))
    return found["tensor"], found["expert"]


def _resident_bytes(sizes: tuple[int, int], config: Config, optimizer: OptimizerConfig, dp: int) -> float:
    """Of weights, gradients and optimizer state of one network on one rank, layers spread evenly."""
    parallel = config.parallel
    shared, experts = sizes
    expert_shards = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    per_rank = (shared / parallel.tensor_model_parallel_size + experts / expert_shards) / parallel.pipeline_model_parallel_size
    weight_bytes = 4 if config.model.dtype == "float32" else 2
    # Gradients and the two moments are float32; bfloat16 weights have a float32 master beside them.
    state_bytes = 8 + (4 if weight_bytes == 2 else 0)
    state_shards = dp * parallel.context_parallel_size if optimizer.use_distributed_optimizer else 1
    return per_rank * (weight_bytes + 4 + state_bytes / state_shards)
