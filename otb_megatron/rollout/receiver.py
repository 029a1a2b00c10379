"""The receiving end of a weight transfer, inside each vLLM worker process.

vLLM imports this module in every worker before the model is loaded, because `WorkerExtension` is named as
`worker_extension_cls`; the import registers `WeightReceiver` in vLLM's weight-transfer factory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from otb_megatron.rollout.routing import RoutingRecorder
from otb_megatron.rollout.transfer import BACKEND, TensorMetadata, TransferGroup, buckets


@dataclass
class Connection(WeightTransferInitInfo):
    """How to reach the sender."""

    address: str
    port: int
    first_rank: int  # rank in the transfer group of this engine's first worker
    world_size: int  # the sender and every worker of every engine
    bucket_bytes: int
    timeout_s: float


@dataclass
class Delivery(WeightTransferUpdateInfo):
    """Every tensor of an update, in the order of sending. An update is always the whole model."""

    names: list[str]
    dtypes: list[str]  # names in `torch`, such as "bfloat16"
    shapes: list[list[int]]

    def metadata(self) -> list[TensorMetadata]:
        return [TensorMetadata(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)]


class WeightReceiver(WeightTransferEngine[Connection, Delivery]):
    """Takes whole updates in Hugging Face checkpoint names through vLLM's own layerwise reload."""

    init_info_cls = Connection
    update_info_cls = Delivery

    def init_transfer_engine(self, init_info: Connection) -> None:
        self._bucket_bytes = init_info.bucket_bytes
        self._group = TransferGroup(
            init_info.address,
            init_info.port,
            rank=init_info.first_rank + self.parallel_config.rank,
            world_size=init_info.world_size,
            device=self.device,
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        # An update that broke off leaves layers waiting for the rest of their tensors, and what they hold would be
        # mixed into this one. Closing it on clean layers does nothing.
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _forget_packed_experts(self.model)
        self._tied_heads = _tied_heads(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Delivery) -> None:
        """Takes every bucket. What goes wrong with one is raised at the end, since the other receivers still want theirs."""
        fault: Exception | None = None
        for bucket in buckets(update_info.metadata(), self._bucket_bytes):
            self._group.await_word()
            flat = torch.empty(sum(tensor.num_elements for tensor in bucket), dtype=bucket[0].dtype, device=self.device)
            self._group.broadcast(flat).wait()
            parts = flat.split([tensor.num_elements for tensor in bucket])
            try:
                _load(self.model, [(tensor.name, part.view(tensor.shape)) for tensor, part in zip(bucket, parts, strict=True)])
            except Exception as error:
                fault = fault or error
        self._group.await_word()
        if fault is not None:
            raise fault
        if missing := _incomplete_modules(self.model, self._tied_heads):
            raise ValueError(f"the update leaves {len(missing)} module(s) of vLLM's model without their weights: {', '.join(missing)}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack(self._tied_heads)

    def shutdown(self) -> None:
        """Nothing to do: the sender closes the group."""


def _load(model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Gives the tensors to the model's own loading."""
    if type(model).__name__ == "GptOssForCausalLM":  # not imported, which would load vLLM's experts for every model
        tensors = list(_past_direct_copies(model, tensors))
    model.load_weights(tensors)


def _past_direct_copies(model: nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """What is left for vLLM's `load_weights` of gpt-oss, in the form that it takes during a reload.

    It copies sinks and the stacked tensors of all experts into the parameters itself (0.32), which are then on the meta device, so that the copy is
    lost; what goes through a parameter's `weight_loader` is kept. That it does with experts under a number each, and never with sinks.
    """
    for name, tensor in tensors:
        if name.endswith(".self_attn.sinks"):
            parameter = model.get_parameter(name.replace(".self_attn.", ".attn."))
            own = tensor.tensor_split(tensor.numel() // parameter.numel())[get_tensor_model_parallel_rank()]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, own)
        elif ".mlp.experts." in name:
            layer, kind = name.split(".mlp.experts.")
            yield from ((f"{layer}.mlp.experts.{expert}.{kind}", weight) for expert, weight in enumerate(tensor))
        else:
            yield name, tensor


def _tied_heads(model: nn.Module) -> list[ParallelLMHead]:
    """Output heads that share the weight of an embedding. To be asked outside an update, during which nothing is shared."""
    embeddings = {id(module.weight) for module in model.modules() if type(module) is VocabParallelEmbedding}
    return [module for module in model.modules() if isinstance(module, ParallelLMHead) and id(module.weight) in embeddings]


def _incomplete_modules(model: nn.Module, tied_heads: list[ParallelLMHead]) -> list[str]:
    """Modules whose parameters were not all sent, with the number of elements they got and need.

    vLLM only logs these, and the part of a fused weight that was not sent is then uninitialised memory. Two kinds of
    module are complete with less than all elements: the rows that pad a vocabulary are never sent, and a tied head gets
    nothing of its own.
    """
    missing = []
    for name, module in model.named_modules():
        info = get_layerwise_info(module)
        if not info.can_load() or module in tied_heads:  # what vLLM has processed, since it was complete, cannot load any more
            continue
        needed = 1 if isinstance(module, VocabParallelEmbedding) else sum(get_tensor_load_numel(p) for p in module.parameters(recurse=False))
        if info.load_numel < needed:
            missing.append(f"{name} ({info.load_numel} of {needed} elements)")
    return missing


def _forget_packed_experts(model: nn.Module) -> None:
    """Makes vLLM pack the experts' weights for the CPU kernel again.

    UnquantizedFusedMoEMethod packs them where it first makes its kernel, and skips that in a reload since the kernel
    exists: the experts then keep computing with memory in the wrong layout. Upstream has no switch against packing and
    no hook to repeat it. On a GPU nothing is packed, and dropping the kernel would detach captured CUDA graphs.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack(tied_heads: list[ParallelLMHead]) -> None:
    """Rebuilds the oneDNN copy of the weight of tied heads.

    The reload processes the embedding only, since a tied head has no tensor in the checkpoint, so the head would keep
    the packed copy of the old weight. Upstream has no hook for layers that share the weight of a reloaded one.
    """
    for head in tied_heads:
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class WorkerExtension:
    """Named as vLLM's `worker_extension_cls`: each worker process imports this module, and its worker has these methods."""

    def record_routed_experts(self) -> None:
        """Starts recording, on the first of an engine's workers, which all compute the same tokens."""
        if self.rank == 0:  # type: ignore[attr-defined]
            self._routing_recorder = RoutingRecorder(self.model_runner)  # type: ignore[attr-defined]

    def take_routed_experts(self) -> dict[tuple[int, int], np.ndarray]:
        """(request, response) -> [tokens, layers, experts per token], of all sequences since the last call; nothing on other workers."""
        return self._routing_recorder.take() if self.rank == 0 else {}  # type: ignore[attr-defined]


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
