"""The Ray cluster that engines run on."""

from __future__ import annotations

import logging
import os
import socket

import ray
import torch

from otb_megatron.types import UserError

OBJECT_STORE_BYTES = 128 * 2**20  # only token ids and log-probs pass through it; weights have their own way


def enter(address: str | None, *, gpus: int, cpus: int) -> None:
    """Joins the cluster at `address`, or starts one on this machine. `ray.shutdown()` leaves it, or ends the one started here.

    Args:
        gpus: number that the engines need.
        cpus: number of engines; a cluster started here counts that many cores.

    Raises:
        UserError: there is no cluster at `address`, or it has too few GPUs.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default, which it asks for in a warning: leave CUDA_VISIBLE_DEVICES alone where no GPU is asked for.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Of several engines that fail, the first one is raised; Ray would print the tracebacks of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        try:
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(free_gpus(gpus))
            ray.init("local", num_cpus=cpus, num_gpus=gpus, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        finally:
            if gpus:
                _restore("CUDA_VISIBLE_DEVICES", visible)
        return
    if address != "auto":
        _check_answers(address)
    try:
        ray.init(address, **{key: value for key, value in quiet.items() if key != "include_dashboard"})
    except ConnectionError as error:
        raise UserError(f"rollout.ray_address={address!r}: no Ray cluster answers there; start one with `ray start --head` or set null") from error
    available = int(ray.cluster_resources().get("GPU", 0))
    if gpus > available:
        ray.shutdown()
        raise UserError(f"the engines need {gpus} GPUs (rollout.num_engines times rollout.tensor_parallel_size), but the Ray cluster has {available}")


def _check_answers(address: str) -> None:
    """Raises UserError unless something listens at `address`; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"rollout.ray_address={address!r}: give host:port of the cluster's head, `auto`, or null")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise UserError(f"rollout.ray_address={address!r}: no Ray cluster answers there ({error}); start one with `ray start --head` or set null") from error


def free_gpus(needed: int) -> list[str]:
    """The machine's GPUs that no rank of the trainer uses: those after the first LOCAL_WORLD_SIZE.

    Raises:
        UserError: there are fewer than `needed`.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    trainer = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if len(devices) < trainer + needed:
        raise UserError(
            f"the engines need {needed} GPUs (rollout.num_engines times rollout.tensor_parallel_size) beside the trainer's {trainer}, "
            f"but this machine shows {len(devices)}; start fewer trainer ranks or give a Ray cluster in rollout.ray_address"
        )
    return devices[trainer : trainer + needed]


def _restore(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
