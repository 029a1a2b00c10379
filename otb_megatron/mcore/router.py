"""Megatron-Core's router, told about the pack that it routes: the sampler's experts, padding, and where sequences begin.

A router sees hidden states only. What else it needs of a microbatch is laid down before the forward pass of a model chunk, and kept by
the routers of layers that will be recomputed: Megatron runs the backward passes of a chunk in the order of its forward passes, so a router that
is called outside a forward pass takes the oldest pack that it has not recomputed yet.

The auxiliary losses of this file are sums over this rank's tokens of a value per token, so that they add up over tensor, context, data
parallel ranks and microbatches. `mcore/step.py` scales the sum to a mean over the tokens of the optimizer step. What is attached is

    coefficient * E * sum over tokens x, experts i of f_i(x) p_i(x)        (arXiv 2101.03961, equation 4, before its division by the tokens)

with E experts, the routing score p and the fraction f of choices that went to expert i. The kinds differ in the tokens that f counts:
those of x's microbatch (`aux_loss`), of x's own sequence (`seq_aux_loss`), or of all replicas' microbatches of this optimizer step so
far (`global_aux_loss`, arXiv 2501.11873). Megatron's own versions (0.19), given what is padding, multiply `aux_loss` by the size of the tensor and
context parallel group once too often (an all-reduce in place overwrites the local count of tokens), take a whole pack for one sequence, set the
mean count of the packs so far against the tokens of the last one, and give NaN for a pack of padding only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from otb_megatron.types import Microbatch

_OTHER_CHOICE = "the experts would be others than vLLM's, which samples from the same model"
_OUTSIDE_FORWARD = "routers would be called apart from the forward pass of their pack"
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "moe_router_load_balancing_type": (lambda kind: kind in ("sinkhorn", "quantile_balancing"), _OTHER_CHOICE),
    "moe_expert_capacity_factor": (lambda factor: factor is not None, "it drops tokens that vLLM computes"),
    "moe_input_jitter_eps": (lambda eps: eps is not None, "the ratio of two policies needs the same network twice"),
    "moe_router_force_load_balancing": (bool, _OTHER_CHOICE),
    "moe_router_force_biased": (lambda std: std is not None, _OTHER_CHOICE),
    "moe_enable_routing_replay": (lambda _: True, "set rollout.router_replay"),
    "moe_token_dispatcher_type": (
        lambda kind: kind == "flex" and not torch.cuda.is_available(),
        "flex needs a GPU; alltoall, the default, and allgather work everywhere",
    ),
    "moe_single_grouped_weight": (bool, "experts are loaded and sent to vLLM one by one"),
    "mlp_chunks_for_training": (lambda chunks: chunks > 1, "a router must see its whole pack"),
    "overlap_moe_expert_parallel_comm": (bool, _OUTSIDE_FORWARD),
}
"""Fields of TransformerConfig that Megatron-Core accepts for an MoE model: the values we cannot compute with, and why."""


def refused_settings(megatron: dict[str, Any], *, router_replay: bool, best_groups: bool) -> list[str]:
    """What `megatron:` must not hold for an MoE model, one line a setting.

    Args:
        best_groups: what `ranks_groups_by_best` says of the model.
    """
    refused = [f"megatron.{key}={megatron[key]!r}: {reason}" for key, (is_refused, reason) in _REFUSED.items() if key in megatron and is_refused(megatron[key])]
    if router_replay and megatron.get("moe_router_fusion"):
        refused.append("megatron.moe_router_fusion=True: the fused top-k takes no recorded choice, which rollout.router_replay needs")
    elif best_groups and megatron.get("moe_router_fusion"):
        refused.append("megatron.moe_router_fusion=True: the fused top-k ranks groups by a sum of scores, and this model by the best one")
    return refused


@dataclass(frozen=True)
class PackRouting:
    """What a rank's routers need to know of a microbatch. Rows are the tokens that this rank routes."""

    is_padding: Tensor  # bool [rows]
    sequence: Tensor  # int64 [rows], number of the sequence that each token belongs to
    num_sequences: int  # of the whole microbatch
    experts: Tensor | None  # int16 [rows, layers, experts per token]; -1: the router's own choice

    @classmethod
    def of(cls, microbatch: Microbatch, rows: Tensor, device: torch.device, *, replays: bool) -> PackRouting:
        """rows: int64 [rows], where this rank's tokens stand in the microbatch; replays: whether recorded experts are used."""
        lengths = microbatch.cu_seqlens.diff()
        sequence = torch.arange(lengths.numel()).repeat_interleave(lengths)[rows]
        experts = microbatch.routed_experts if replays else None
        return cls(
            microbatch.is_padding[rows].to(device),
            sequence.to(device),
            lengths.numel(),
            None if experts is None else experts[rows].to(device, non_blocking=True),
        )


class RecordedChoice(RouterReplay):
    """Megatron's hook into the choice of experts: the sampler's choice where there is a record, the router's own elsewhere.

    Weights of the chosen experts come from the router's scores as ever, so the router is trained through the recorded choice.
    Megatron's base class replays one choice for all tokens and keeps a list of all routers of the process, which outlives models and
    knows no layers; neither is used.
    """

    def __init__(self, disagreement: Callable[[Tensor, Tensor], None], *, best_groups: bool) -> None:
        """
        Args:
            disagreement: takes the number of recorded choices that the router would not have made, and of all recorded ones.
            best_groups: what `ranks_groups_by_best` says of the model. A recorded expert may lie in any group.
        """
        self.layer_number: int | None = None
        self.recorded: Tensor | None = None  # int16 [rows, experts per token]
        self._disagreement = disagreement
        self._best_groups = best_groups

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None, default_compute_topk: Any = None
    ) -> tuple[Tensor, Tensor]:
        """scores [rows, experts] -> (scores of the chosen experts, their numbers), both [rows, experts per token]."""
        choose = _choose_in_best_groups if self._best_groups else default_compute_topk
        values, own = choose(scores, topk, num_groups, group_topk)
        if self.recorded is None:
            return values, own
        recorded = self.recorded.to(own.dtype)
        is_recorded = recorded >= 0
        chosen = torch.where(is_recorded, recorded, own)
        if torch.is_grad_enabled():
            differs = (recorded[:, :, None] != own[:, None, :]).all(-1) & is_recorded
            self._disagreement(differs.sum(), is_recorded.sum())
        return scores.gather(1, chosen), chosen


class PackedRouter(TopKRouter):
    """Megatron's top-k router for packs. It must be called within `routing`, or in the backward pass of a call that was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = RecordedChoice(
            lambda total, count: self._tally("moe/router_disagreement", total, count), best_groups=ranks_groups_by_best(vars(self.config))
        )
        self.entered: PackRouting | None = None
        self.trains = False  # whether a backward pass will follow the forward pass under way
        self.to_recompute: deque[PackRouting] = deque()
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}  # of this optimizer step: name -> (total, count)
        self._pack: PackRouting | None = None
        self._global_choices = 0

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> Any:
        """input [rows, 1, hidden] -> (weights, choice), both [rows, experts]."""
        if self.entered is None and not self.to_recompute:
            raise RuntimeError("a router of a packed model was called without its pack; run the model within mcore.router.routing")
        if self.entered is None:
            self._pack = self.to_recompute.popleft()
        else:
            self._pack = self.entered
            if self.trains and not torch.is_grad_enabled():  # within a checkpoint, which will call again
                self.to_recompute.append(self._pack)
        rows = self._pack.is_padding.numel()
        if input.shape[0] * input.shape[1] != rows:
            raise RuntimeError(f"layer {self.layer_number} routes {input.shape[0] * input.shape[1]} tokens of a pack that has {rows} here")
        experts = self._pack.experts
        self.router_replay.recorded = None if experts is None else experts[:, self.layer_number - 1]
        return super().forward(input, padding_mask=self._pack.is_padding[:, None])

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """coefficient * sum over tokens of logsumexp(logits)^2 (arXiv 2202.08906, equation 5, before its division by the tokens)."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not (self.training and torch.is_grad_enabled()):
            return logits
        assert padding_mask is not None
        loss = (logits.float().logsumexp(-1).square() * ~padding_mask).sum()
        self._tally("moe/z_loss", loss, (~padding_mask).sum())
        return MoEAuxLossAutoScaler.apply(logits, coefficient * loss)

    def _apply_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False) -> Tensor:
        if not self.get_aux_loss_coeff("aux_loss"):
            return probs
        choices = self._over_ranks(routing_map.sum(0, dtype=torch.float32), self.tp_cp_group)
        return self._attach("aux_loss", probs, scores_for_aux_loss, _fractions(choices))

    def _apply_seq_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, seq_length: int, bsz: int, with_padding_mask: bool = False
    ) -> Tensor:
        if not self.get_aux_loss_coeff("seq_aux_loss"):
            return probs
        assert self._pack is not None
        choices = routing_map.new_zeros(self._pack.num_sequences, routing_map.size(1), dtype=torch.float32)
        choices = self._over_ranks(choices.index_add_(0, self._pack.sequence, routing_map.float()), self.tp_cp_group)
        return self._attach("seq_aux_loss", probs, scores_for_aux_loss, _fractions(choices)[self._pack.sequence])

    def _apply_global_aux_loss(self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False) -> Tensor:
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        self._global_choices = self._global_choices + self._over_ranks(routing_map.sum(0, dtype=torch.float32), self.tp_dp_cp_group)
        return self._attach("global_aux_loss", probs, scores_for_aux_loss, _fractions(self._global_choices))

    def _attach(self, kind: str, probs: Tensor, scores: Tensor, fractions: Tensor) -> Tensor:
        """Adds the gradient of the loss to `probs`. scores and fractions [rows, experts] or [experts]; scores of padding are zero."""
        assert self._pack is not None
        loss = self.num_experts * (scores * fractions).sum()
        self._tally(f"moe/{kind}", loss, (~self._pack.is_padding).sum())
        return MoEAuxLossAutoScaler.apply(probs, self.get_aux_loss_coeff(kind) * loss)

    def reset_global_aux_loss_tracker(self) -> None:
        """Megatron calls it once an optimizer step."""
        super().reset_global_aux_loss_tracker()
        self._global_choices = 0

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Megatron combines [rows, experts] with [rows], which fails, or masks experts where both are of one size."""
        super()._apply_expert_bias(routing_map, padding_mask=None if padding_mask is None else padding_mask[:, None])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves buffers but leaves them float32: a bfloat16 model would round the bias of each expert and count in steps of two from 256 on."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        result = super()._apply(fn, recurse)
        for name, buffer in kept.items():
            buffer.data = buffer.data.to(self._buffers[name].device)  # type: ignore[union-attr]
            self._buffers[name] = buffer
        return result

    def _tally(self, name: str, total: Tensor, count: Tensor) -> None:
        before = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before[0] + total.detach(), before[1] + count)

    @staticmethod
    def _over_ranks(choices: Tensor, group: dist.ProcessGroup) -> Tensor:
        if group.size() > 1:
            dist.all_reduce(choices, group=group)
        return choices


def _fractions(choices: Tensor) -> Tensor:
    """[..., experts] numbers of choices -> their fractions, zero where nothing was chosen."""
    return choices / choices.sum(-1, keepdim=True).clamp(min=1)


def ranks_groups_by_best(fields: dict[str, Any]) -> bool:
    """Whether a model takes the groups that hold the best single experts (DeepSeek-V2, arXiv 2405.04434, section 2.2.2).

    Megatron-Core scores a group by the sum of its best k / groups experts, as DeepSeek-V3 does.

    Args:
        fields: those of TransformerConfig.
    """
    return bool(fields.get("moe_router_num_groups")) and fields.get("moe_router_score_function") == "softmax"


def _choose_in_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> tuple[Tensor, Tensor]:
    """scores [rows, experts] -> (scores of the chosen experts, their numbers), both [rows, topk], from the groups with the best single experts."""
    best = scores.unflatten(-1, (num_groups, -1)).amax(-1)
    taken = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(group_topk, -1).indices, True)
    return scores.masked_fill(~taken.repeat_interleave(scores.size(-1) // num_groups, -1), float("-inf")).topk(topk, -1)


def use_packed_router(spec: TransformerBlockSubmodules) -> None:
    """Puts our router into every MoE layer of a decoder's specification."""
    for layer in spec.layer_specs:
        builder = layer.submodules.mlp
        if getattr(builder, "func", None) is MoELayer:
            builder.keywords["submodules"].router = PackedRouter


def routers(chunk: torch.nn.Module) -> list[PackedRouter]:
    """The routers of a model chunk, from the first layer on; `chunk` may be wrapped for training."""
    found = [layer.mlp.router for layer in get_attr_wrapped_model(chunk, "decoder").layers if isinstance(layer.mlp, MoELayer)]
    assert all(isinstance(router, PackedRouter) for router in found), "use_packed_router missed a layer"
    return found


@contextmanager
def routing(chunk: torch.nn.Module, pack: PackRouting) -> Iterator[None]:
    """Within the block, which is one forward pass, the chunk's routers work on `pack`."""
    for router in routers(chunk):
        router.entered, router.trains = pack, torch.is_grad_enabled()
    try:
        yield
    finally:
        for router in routers(chunk):
            router.entered = None


def num_waiting(chunks: list[torch.nn.Module]) -> int:
    """Calls of routers whose recomputation has not come. None should be left after the last backward pass."""
    return sum(len(router.to_recompute) for chunk in chunks for router in routers(chunk))


def take_sums(chunks: list[torch.nn.Module]) -> dict[str, tuple[float, float]]:
    """Sums over tokens and layers with the number of those, since the last call: auxiliary losses before their coefficients, and disagreements."""
    sums: dict[str, tuple[float, float]] = {}
    for chunk in chunks:
        for router in routers(chunk):
            for name, (total, count) in router.sums.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(total), before[1] + float(count))
            router.sums = {}
    return sums
