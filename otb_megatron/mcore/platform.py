"""What Megatron-Core 0.19 needs to run without CUDA, or with torch's own Adam.

Megatron names CUDA in its factory calls, streams and random-number trackers and offers no hook for another device.
Modules below `megatron` therefore see a stand-in for the name `torch` that forwards everything except what is listed
here, with its reason. Other libraries keep the real module. Methods of Tensor and Module cannot be replaced for one
importer only; those few are process-wide.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import queue
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHATTY = (
    "megatron.core.models.gpt.gpt_model",  # GPTModel says at every start that it is frozen upstream
    "megatron.core.distributed.distributed_data_parallel",  # advises to compute the layout that it then computes itself
    "megatron.core.rerun_state_machine",  # says that it starts disabled, as wanted
    "megatron.core.dist_checkpointing.strategies.torch",  # advertises another package's writer at every save
    "torch.utils.cpp_extension",  # says at import that it found no CUDA runtime
)
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like", "full_like")


def prepare() -> None:
    """Installs the stand-in and the repairs. Must run before the first import of `megatron.core`; a second call does nothing.

    With a GPU there is no stand-in; the repair for checkpoints remains, and without Transformer Engine and Apex the one for torch's Adam.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # each module names the optional packages it lacks
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    if torch.cuda.is_available():
        has_adam = any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))
        sys.meta_path.insert(0, _MegatronFinder(torch, _CHECKPOINT_REPAIRS | ({} if has_adam else _TORCH_ADAM_REPAIRS)))
        return
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before otb_megatron.mcore; import otb_megatron.mcore first")
    # Megatron's jit_fuser is torch.compile: its first step compiles small functions for up to 20 s.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    sys.meta_path.insert(0, _MegatronFinder(_torch_without_cuda(), _CPU_REPAIRS | _CHECKPOINT_REPAIRS | _TORCH_ADAM_REPAIRS))
    # Tied embeddings under PP, CP index tensors and optimizer checkpoints call .cuda() on tensors; streams record them.
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type_names(torch.Tensor.type)  # type: ignore[method-assign]


def uses_transformer_engine() -> bool:
    """Transformer Engine's layers where a GPU and the package are there; otherwise the modules of this package."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


class _Forwarding(types.ModuleType):
    """A module that answers from `replaced` and asks `target` for everything else."""

    def __init__(self, target: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _NullStream:
    """Stands for a CUDA stream or event: everything is already in order on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def record_event(self, *args: Any) -> _NullStream:
        return self

    def record(self, *args: Any) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, *args: Any) -> None: ...

    wait_stream = wait_event = synchronize = wait


def _torch_without_cuda() -> _Forwarding:
    cuda = _Forwarding(
        torch.cuda,
        dict(
            # `is_available` stays False: Megatron's own CPU branches must be taken where it has them.
            current_device=lambda: "cpu",
            device_count=lambda: 1,
            set_device=lambda *args: None,
            synchronize=lambda *args, **kwargs: None,
            empty_cache=lambda: None,
            Stream=_NullStream,
            Event=_NullStream,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda *args: _NullStream(),
            default_stream=lambda *args: _NullStream(),
            get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
            set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
            manual_seed=torch.manual_seed,
        ),
    )
    return _Forwarding(torch, {"cuda": cuda} | {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES})


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Turns device="cuda" (or a device number) into the CPU and drops pinned memory, which needs a CUDA driver."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _cuda_type_names(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizers and gradient clipping compare `tensor.type()` with "torch.cuda.FloatTensor"; they get that name."""

    def tensor_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        asked_by_megatron = sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.")
        return name.replace("torch.", "torch.cuda.", 1) if asked_by_megatron and not args and not kwargs else name

    return tensor_type


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Gives each imported `megatron` module the stand-in for `torch` and its own repair."""

    def __init__(self, stand_in: types.ModuleType, repairs: dict[str, Callable[[Any], None]]) -> None:
        self.stand_in, self.repairs = stand_in, repairs

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.stand_in
            self.repairs.get(name, lambda module: None)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _repair_random(module: Any) -> None:
    """The tracker reads the generator through torch._C; without TE the default fp8=False of recompute counts as "fp8 on" (NameError)."""
    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    init = module.CheckpointWithoutOutput.__init__
    module.CheckpointWithoutOutput.__init__ = lambda self, fp8=None: init(self, fp8 or None)


def _repair_dispatcher(module: Any) -> None:
    """MoE all-to-all split sizes become host integers only `if tensor.is_cuda`; gloo then receives tensors and raises TypeError."""
    module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _repair_mappings(module: Any) -> None:
    """gloo's all_gather and reduce_scatter need equal sizes; MoE with expert tensor parallelism uses unequal ones."""
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(tensor: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(tensor, group, output_split_sizes, use_global_buffer)
        padded = tensor.new_zeros((max(output_split_sizes), *tensor.shape[1:]))
        padded[: tensor.size(0)] = tensor
        received = [torch.empty_like(padded) for _ in output_split_sizes]
        dist.all_gather(received, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(received, output_split_sizes, strict=True)])

    def reduce_scatter(tensor: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(tensor, group, input_split_sizes, use_global_buffer)
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed.split(input_split_sizes)[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, reduce_scatter


def _repair_distributed_optimizer(module: Any) -> None:
    """Checkpointing with torch's Adam, which Megatron falls back to when neither TE nor Apex is installed (so on every CPU).

    Saving before the first step asserts a `step` that does not exist yet where `build_optimizer` cannot make one, with Adam on
    two devices; loading writes `step` into views of leaf parameters; and after loading all parameters share one `step` tensor,
    which Adam then increments once per parameter, a silently wrong bias correction.
    """
    optimizer = module.DistributedOptimizer
    state_dict, set_state, load = optimizer.state_dict, optimizer._set_main_param_and_optimizer_states, optimizer.load_state_dict

    def state_dict_from_step_zero(self: Any) -> Any:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if not self.optimizer.state.get(parameter):
                    zeros = torch.zeros_like(parameter.data)
                    self.optimizer.state[parameter] = dict(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
        return state_dict(self)

    @torch.no_grad()
    def set_state_without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        return set_state(self, parameter, {**tensors, "step": None})

    def load_with_own_step(self: Any, state: Any) -> None:
        load(self, state)
        for entry in self.optimizer.state.values():
            if "step" in entry:
                entry["step"] = entry["step"].clone()

    optimizer.state_dict = state_dict_from_step_zero
    optimizer._set_main_param_and_optimizer_states = set_state_without_step
    optimizer.load_state_dict = load_with_own_step


def _repair_checkpoint_writer(module: Any) -> None:
    """The writer's results pass through a queue in a process of its own, for writers that are processes.

    Ours are threads. That process imports the main program again (5 to 10 s on every rank) and outlives a rank that is killed.
    """
    module.get_write_results_queue = lambda mp_mode="spawn": queue.SimpleQueue()


_CPU_REPAIRS: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.random": _repair_random,
    "megatron.core.tensor_parallel.mappings": _repair_mappings,
    "megatron.core.transformer.moe.token_dispatcher": _repair_dispatcher,
}
_CHECKPOINT_REPAIRS: dict[str, Callable[[Any], None]] = {"megatron.core.dist_checkpointing.strategies.filesystem_async": _repair_checkpoint_writer}
_TORCH_ADAM_REPAIRS: dict[str, Callable[[Any], None]] = {"megatron.core.optimizer.distrib_optimizer": _repair_distributed_optimizer}
