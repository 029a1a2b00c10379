"""Megatron-Core's DistributedDataParallel, Adam and learning-rate schedule around a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

from otb_megatron.config import OptimizerConfig
from otb_megatron.mcore.model import Model
from otb_megatron.mcore.optimizer_state import keep_in_place


@dataclass(frozen=True)
class Optimizer:
    """What the training step needs to turn gradients into weights."""

    chunks: list[DistributedDataParallel]
    megatron: MegatronOptimizer
    schedule: OptimizerParamScheduler

    @property
    def learning_rate(self) -> float:
        rate = get_canonical_lr_for_logging(self.megatron.param_groups)
        assert rate is not None
        return rate

    @property
    def has_step_of_parameter(self) -> bool:
        """Whether each parameter counts its updates, as in torch's Adam; the others count them in the parameter groups, from a missing one."""
        return any(isinstance(part.optimizer, torch.optim.Adam) for part in _parts(self.megatron))

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> float:
        """The k-th update runs at the schedule's k-th rate, with gradient clipping. Returns the global gradient norm before clipping.

        A gradient of zero is no update, and nothing moves: neither weights, which Adam would still change by its momentum and weight
        decay, nor moments nor schedule. The one exception is no parameter: with `megatron.moe_router_bias_update_rate` above 0,
        Megatron has moved the routers' bias by the experts' load before it comes here.
        """
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        if grad_norm != 0.0:
            self.schedule.step(1)  # before the update: at its start the schedule stands at 0, which under warm-up is a rate of zero
            self.megatron.step()
        return grad_norm

    def close(self) -> None:
        """Lets go of the model; nothing can be done with the optimizer afterwards.

        Megatron's hooks on the gradients lead from autograd's own objects, where Python's collector sees no cycle, back to the model, and the
        optimizer's views of the weights lead to those objects. Without this, model, groups and their threads outlive their last user.
        """
        for chunk in self.chunks:
            chunk.grad_accs.clear()
        for part in _parts(self.megatron):
            vars(part).clear()


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Megatron's optimizers of dense and of expert parameters, without those that have none."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def _create_moments(optimizer: MegatronOptimizer) -> None:
    """Gives every parameter Adam's moments of step 0, as its first update would.

    Megatron-Core saves the moments that exist and loads all of them: a checkpoint from before the first update, as of the policy during
    the critic's warm-up, could not be loaded. The optimizer on two devices (`optimizer_offload_fraction`) makes its
    moments by an update that moves the weights, and offers nothing else; it is left alone.
    """
    for part in _parts(optimizer):
        if part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(0.0)


def megatron_optimizer_config(settings: OptimizerConfig, dtype: torch.dtype) -> MegatronOptimizerConfig:
    """Megatron-Core's configuration of the optimizer for parameters of `dtype`."""
    offloads = settings.optimizer_offload_fraction > 0
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        optimizer_cpu_offload=offloads,
        optimizer_offload_fraction=settings.optimizer_offload_fraction,
        # The optimizer on two devices keeps the float32 weights itself, which Megatron-Core asks for by this name.
        use_precision_aware_optimizer=offloads,
        overlap_cpu_optimizer_d2h_h2d=offloads,
    )


def build_optimizer(model: Model, settings: OptimizerConfig, num_steps: int) -> Optimizer:
    """Wraps the model for training. Gradients are summed over ranks; the step divides once, by global counts.

    Args:
        num_steps: optimizer steps of the whole run, over which the rate decays unless `lr_decay_steps` says otherwise.
    """
    groups = model.parallel.groups
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.use_distributed_optimizer,
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,
    )
    # Only the first chunk's gradients come in bucket order; Megatron's own loop turns bucketing off for the others too.
    chunks = [
        DistributedDataParallel(model.config, ddp, chunk, disable_bucketing=number > 0, pg_collection=groups)
        for number, chunk in enumerate(model.wrapped_chunks())
    ]
    optimizer = get_megatron_optimizer(
        megatron_optimizer_config(settings, model.config.params_dtype), chunks, use_gloo_process_groups=torch.cuda.is_available(), pg_collection=groups
    )
    num_steps = settings.lr_decay_steps or num_steps
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if settings.lr_warmup_steps else settings.lr,
        max_lr=settings.lr,
        min_lr=min(settings.min_lr, settings.lr),
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=num_steps,
        lr_decay_style=settings.lr_decay_style,
        # Its step() is also the only place where Megatron turns weight decay off for norms and biases.
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=num_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    _create_moments(optimizer)
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            keep_in_place(part)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.grad_scale_func = optimizer.scale_loss
    return Optimizer(chunks, optimizer, schedule)
