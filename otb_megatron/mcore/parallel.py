"""Process groups of a run, made once from the configuration and handed down."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from otb_megatron.config import ParallelConfig
from otb_megatron.types import UserError


@dataclass(frozen=True)
class Parallel:
    """Where this rank stands and the groups it talks in."""

    groups: ProcessGroupCollection  # tp, pp, cp, ep, dp, dp_cp, embd, ...
    control: dist.ProcessGroup  # gloo over all ranks, for the driver's messages; waits at most trainer.deadline_s
    device: torch.device
    rank: int
    world_size: int
    virtual_stages: int | None

    @property
    def tp_rank(self) -> int:
        return self.groups.tp.rank()

    @property
    def dp_rank(self) -> int:
        return self.groups.dp.rank()

    @property
    def dp_size(self) -> int:
        return self.groups.dp.size()

    @property
    def cp_rank(self) -> int:
        return self.groups.cp.rank()

    @property
    def cp_size(self) -> int:
        return self.groups.cp.size()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def is_driver(self) -> bool:
        return self.rank == 0


def world() -> tuple[int, int]:
    """(rank, world size) as torchrun set them; (0, 1) for a process started alone."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def data_parallel_size(config: ParallelConfig, world_size: int) -> int:
    """What the model-parallel sizes leave of the world.

    Raises:
        UserError: sizes that do not multiply to the world size, or an expert layout that does not fit it.
    """
    model_parallel_size = config.model_parallel_size
    if world_size % model_parallel_size:
        raise UserError(
            f"{world_size} process(es) cannot hold tensor_model_parallel_size {config.tensor_model_parallel_size} x pipeline_model_parallel_size "
            f"{config.pipeline_model_parallel_size} x context_parallel_size {config.context_parallel_size} = {model_parallel_size}; "
            f"start a multiple of {model_parallel_size} processes (--nproc-per-node) or change the parallel section"
        )
    expert_size = config.expert_model_parallel_size * config.expert_tensor_parallel_size * config.pipeline_model_parallel_size
    if world_size % expert_size:
        raise UserError(
            f"{world_size} process(es) cannot hold expert_model_parallel_size {config.expert_model_parallel_size} x expert_tensor_parallel_size "
            f"{config.expert_tensor_parallel_size} x pipeline_model_parallel_size {config.pipeline_model_parallel_size} = {expert_size}"
        )
    return world_size // model_parallel_size


def start_parallel(config: ParallelConfig, *, seed: int, deadline_s: float, deterministic: bool = False) -> Parallel:
    """Joins the process group (NCCL on GPUs, gloo without) and makes every parallel group. Collective over the world.

    Args:
        deterministic: make every run of the same program on the same ranks give the same bits; slower.
    """
    if deterministic:
        _compute_deterministically()
    rank, world_size = world()
    data_parallel_size(config, world_size)
    deadline = timedelta(seconds=deadline_s)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=deadline)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(deadline_s / 60)),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Parallel(
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        control=dist.new_group(backend="gloo", timeout=deadline),
        device=device,
        rank=rank,
        world_size=world_size,
        virtual_stages=config.virtual_pipeline_model_parallel_size,
    )


def _compute_deterministically() -> None:
    """What Megatron-Core's `deterministic_mode` leaves to its caller. Must precede the first use of CUDA and NCCL, which read these once.

    Raises:
        UserError: the environment asks for something else.
    """
    # A workspace of fixed size for cuBLAS; one order of summation for NCCL; no attention kernel of Transformer Engine that adds atomically.
    needed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    accepted = {"CUBLAS_WORKSPACE_CONFIG": (":16:8",), "NCCL_ALGO": ("CollnetDirect", "CollnetChain", "^NVLS")}  # by Megatron-LM's own check
    for name, value in needed.items():
        found = os.environ.setdefault(name, value)
        if found != value and found not in accepted.get(name, ()):
            raise UserError(f"megatron.deterministic_mode with {name}={found} in the environment: unset it, or set {name}={value}")
    torch.use_deterministic_algorithms(True)


def stop_parallel() -> None:
    """Leaves every group."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
