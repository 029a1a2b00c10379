"""What a run would do, in words and numbers, without starting it."""

from __future__ import annotations

import math

from otb_megatron.config import Config
from otb_megatron.mcore.parallel import data_parallel_size
from otb_megatron.trainer.validate import validate
from otb_megatron.weights.files import Checkpoint


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
    checkpoint = Checkpoint(hf.path)
    padded = hf.padded_vocab_size(tp, config.model.make_vocab_size_divisible_by)
    expert_names = {name for rule in hf.rules(padded) if rule.group == "expert" for name in rule.hf}
    sizes = {name: math.prod(checkpoint.shape(name)) for name in checkpoint.names}
    num_parameters, num_expert = sum(sizes.values()), sum(size for name, size in sizes.items() if name in expert_names)
    expert_shards = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    per_rank = ((num_parameters - num_expert) / tp + num_expert / expert_shards) / parallel.pipeline_model_parallel_size
    weight_bytes = 4 if config.model.dtype == "float32" else 2
    # Gradients and the two moments are float32; bfloat16 weights have a float32 master beside them.
    state_bytes = 8 + (4 if weight_bytes == 2 else 0)
    state_shards = dp * parallel.context_parallel_size if config.optimizer.use_distributed_optimizer else 1
    resident = per_rank * (weight_bytes + 4 + state_bytes / state_shards)
    samples = config.data.prompts_per_step * (config.rollout.n if task == "train" else 1)
    rows = [
        ("task", task),
        ("model", f"{hf.path} ({hf.config['model_type']}, {num_parameters / 1e6:.2f} M parameters, {config.model.dtype})"),
        ("ranks", f"{world_size} = TP {tp} x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} x DP {dp}"),
        ("experts", f"EP {parallel.expert_model_parallel_size} x expert TP {parallel.expert_tensor_parallel_size}"),
        ("vocabulary", f"{hf.vocab_size}, padded to {padded}, {padded // tp} a rank"),
        ("weights, gradients, optimizer", f"{resident / 2**30:.2f} GiB a rank at least; activations come on top"),
        ("samples a step", f"{samples} ({config.data.prompts_per_step} prompts x {samples // config.data.prompts_per_step})"),
        ("optimizer steps", f"{config.trainer.num_steps * config.algorithm.optimizer_steps_per_rollout}"),
        ("writes to", str(config.trainer.output_dir)),
    ]
    if task == "train":
        rows.insert(6, ("advantage and loss", f"{config.algorithm.advantage}, {config.algorithm.loss} ({config.algorithm.aggregation})"))
        rows.insert(7, ("rollout", f"{rollout.num_engines} vLLM engine(s) x TP {rollout.tensor_parallel_size}, temperature {rollout.temperature}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
