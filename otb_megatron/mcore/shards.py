"""Weights between Hugging Face names and this rank's Megatron parameters, in any parallel layout."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from otb_megatron.mcore.model import Model
from otb_megatron.mcore.platform import uses_transformer_engine
from otb_megatron.types import UserError
from otb_megatron.weights.architectures import VALUE_HEAD
from otb_megatron.weights.files import Checkpoint, num_not_finite
from otb_megatron.weights.rules import Rule

# Transformer Engine's layers fuse norms into the linear layer behind them and number the experts of a grouped GEMM in the parameter's name.
_TRANSFORMER_ENGINE_NAMES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$", r"self_attention.\1_layernorm.weight"),
    (r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2"),
)

# The layers that compress queries, keys and values are cut over the tensor-parallel group without Transformer Engine and repeated with it.
_REPEATED_BY_TRANSFORMER_ENGINE = re.compile(r"self_attention\.linear_(q|kv)_down_proj\.weight$")


@dataclass(frozen=True)
class _Shard:
    """One rank's part of a parameter, as the other ranks need to know it."""

    index: int
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Received(NamedTuple):
    """A shard on rank 0, complete once `work` is done."""

    tensor: Tensor
    work: dist.Work | None


def check_names(model: Model, checkpoint: Checkpoint) -> set[str]:
    """The tensors of a checkpoint that make the model.

    A critic also starts from a policy's checkpoint, without a value layer; the output layer is then left out.

    Raises:
        UserError: names every tensor that the model needs and the checkpoint lacks, and the other way round.
    """
    rules = model.rules
    expected = {name for rule in rules for name in rule.hf}
    unused = {name for name in checkpoint.names - expected if not model.hf.is_left_out(name)}
    if model.is_critic:
        unused.discard("lm_head.weight")
        expected -= VALUE_HEAD - checkpoint.names
    faults = [f"missing: {name}" for name in sorted(expected - checkpoint.names)] + [f"no parameter for: {name}" for name in sorted(unused)]
    if faults:
        raise _weight_error(checkpoint, faults)
    return expected


def load_weights(model: Model, checkpoint: Checkpoint, progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Fills this rank's parameters from a Hugging Face checkpoint, reading only what belongs to this rank.

    The value layer of a critic whose checkpoint has none stays as it is.

    Args:
        progress: called with the bytes done, of `num_local_bytes`, after each parameter.

    Raises:
        UserError: all missing and unused tensors of the whole model at once, or all of this rank's that have another shape, hold values that are
            NaN, infinite or too large for the model's dtype, or cannot be read.
    """
    expected = check_names(model, checkpoint)
    faults: dict[str, None] = {}  # in order; each expert finds what is wrong with a tensor of all experts
    done = 0
    by_name = {rule.megatron: rule for rule in model.rules}
    for name, parameter in _named_state(model).items():
        rule = by_name[name]
        if not expected.issuperset(rule.hf):
            continue
        try:
            _fill(parameter, checkpoint, rule, *_shard_place(model, rule))
        except UserError as error:
            faults[str(error)] = None
        done += parameter.nbytes
        progress(done)
    if faults:
        raise _weight_error(checkpoint, list(faults))


@torch.no_grad()
def _fill(parameter: Tensor, checkpoint: Checkpoint, rule: Rule, size: int, rank: int) -> None:
    """Copies a shard into this rank's parameter. Raises UserError if a tensor has another shape, or holds what the parameter cannot."""
    shapes = {part: (checkpoint.shape(part), whole) for part, whole in zip(rule.hf, _hf_shapes(rule, tuple(parameter.shape), size), strict=True)}
    # One by one: a row too many in one tensor and too few in the next one join into the right shape.
    if wrong := [f"{part} has the shape {list(found)} instead of {list(whole)}" for part, (found, whole) in shapes.items() if found != whole]:
        raise UserError("; ".join(wrong))
    shard = _read_shard(checkpoint, rule, size, rank)
    parameter.copy_(shard)
    if shard.dtype != parameter.dtype and (count := num_not_finite(parameter)):
        raise UserError(f"{' + '.join(rule.hf)}: {count} values are too large for {str(parameter.dtype).removeprefix('torch.')}")


def _hf_shapes(rule: Rule, shard: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    """The shapes of the Hugging Face tensors of a parameter that is cut into `size` shards of the shape `shard`."""
    whole = rule.layout.unshard([torch.empty(shard, device="meta")] * size)
    stacked = () if rule.stack is None else (rule.stack.size,)
    return [stacked + tuple(part.shape) for part in rule.layout.to_hf(whole)]


def num_local_bytes(model: Model) -> int:
    """Size of this rank's part of the weights."""
    return sum(tensor.nbytes for tensor in _named_state(model).values())


def _read_shard(checkpoint: Checkpoint, rule: Rule, size: int, rank: int) -> Tensor:
    """This rank's part of a Megatron parameter, from those parts of the Hugging Face tensors that it is made of."""
    dim, layout = rule.layout.dim, rule.layout
    if rule.stack is not None:
        return layout.to_megatron([checkpoint.get(part, 0, rule.stack.index) for part in rule.hf])
    if dim is None or size == 1:
        return layout.to_megatron([checkpoint.get(part) for part in rule.hf])
    spans = [layout.span(checkpoint.shape(part)[dim], size, rank) for part in rule.hf]
    return layout.share(size, rank).to_megatron([checkpoint.get(part, dim, span) for part, span in zip(rule.hf, spans, strict=True)])


def _weight_error(checkpoint: Checkpoint, faults: list[str]) -> UserError:
    shown = "\n".join(f"  {fault}" for fault in faults[:20]) + (f"\n  ... and {len(faults) - 20} more" if len(faults) > 20 else "")
    told = f"the weights in {checkpoint.directory} are not those that its config.json describes:\n{shown}"
    return UserError(f"{told}\nnothing was loaded; download or export the model again")


class FullWeights:
    """A model's weights under Hugging Face names, whole, streamed to rank 0 tensor by tensor.

    Building one is collective over the world; so is each pass over `tensors()`, which every rank must exhaust.
    """

    def __init__(self, model: Model) -> None:
        self._state = _named_state(model)
        # Rules of one stack of Hugging Face tensors together, every other one alone.
        self._groups = [list(rules) for _, rules in itertools.groupby(model.rules, key=lambda rule: rule.hf)]
        self._parallel = model.parallel
        self.dtype = model.config.params_dtype
        rules = {rule.megatron: rule for rule in model.rules}
        places = {}
        for name, parameter in self._state.items():
            count, index = _shard_place(model, rules[name])
            places[name] = _Shard(index, count, tuple(parameter.shape), parameter.dtype)
        everyone: list[dict[str, _Shard]] = [{}] * self._parallel.world_size
        dist.all_gather_object(everyone, places, group=self._parallel.control)
        # For each parameter and shard the first rank that holds it sends; replicas stay silent.
        self._senders: dict[str, dict[int, tuple[int, _Shard]]] = {}
        for rank, held in enumerate(everyone):
            for name, shard in held.items():
                self._senders.setdefault(name, {}).setdefault(shard.index, (rank, shard))
        for rule in model.rules:
            senders = self._senders.get(rule.megatron, {})
            count = next(iter(senders.values()))[1].count if senders else 0
            if len(senders) != max(count, 1):
                raise RuntimeError(f"{rule.megatron}: the ranks hold shards {sorted(senders)} of {count}")

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and full shape of every tensor in the order of `tensors()`. On rank 0; not collective."""
        described = []
        for rules in self._groups:
            shards = [
                [torch.empty(shard.shape, dtype=shard.dtype, device="meta") for _, (_, shard) in sorted(self._senders[rule.megatron].items())] for rule in rules
            ]
            described += [(name, part.dtype, tuple(part.shape)) for name, part in zip(rules[0].hf, _to_hf(rules, shards), strict=True)]
        return described

    @property
    def num_parameters(self) -> int:
        """Of the whole model. On rank 0; 0 elsewhere."""
        return sum(math.prod(shape) for _, _, shape in self.metadata()) if self._parallel.is_driver else 0

    def tensors(self, first: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors from number `first` on, on rank 0; on other ranks it yields nothing and takes part. `first` is the same on all."""
        number = 0
        coming: tuple[list[Rule], list[list[_Received]], int] | None = None  # on its way while the consumer works on the one before
        for rules in self._groups:
            num_tensors = len(rules[0].hf)
            number += num_tensors
            if number <= first:
                continue
            received = [self._exchange(rule) for rule in rules]
            if coming is not None:
                yield from self._join(*coming)
            coming = (rules, received, max(0, num_tensors - (number - first)))
        if coming is not None:
            yield from self._join(*coming)

    def _exchange(self, rule: Rule) -> list[_Received]:
        """Sends this rank's shards of a parameter to rank 0, or there begins to receive those of all."""
        shards = []
        for _, (sender, shard) in sorted(self._senders[rule.megatron].items()):
            own = self._parallel.rank == sender
            if own and not self._parallel.is_driver:
                dist.send(self._state[rule.megatron].detach().contiguous(), dst=0)
            elif own:
                shards.append(_Received(self._state[rule.megatron].detach(), None))
            elif self._parallel.is_driver:
                buffer = torch.empty(shard.shape, dtype=shard.dtype, device=self._parallel.device)
                shards.append(_Received(buffer, dist.irecv(buffer, src=sender)))
        return shards

    def _join(self, rules: list[Rule], received: list[list[_Received]], skip: int) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors of a parameter, or of a stack of them, from number `skip` on, on rank 0."""
        if not self._parallel.is_driver:
            return
        for shard in itertools.chain.from_iterable(received):
            if shard.work is not None:
                shard.work.wait()
        parts = _to_hf(rules, [[shard.tensor for shard in shards] for shards in received])
        yield from list(zip(rules[0].hf, parts, strict=True))[skip:]


def _to_hf(rules: list[Rule], shards: list[list[Tensor]]) -> list[Tensor]:
    """The Hugging Face tensors of one rule, or of all rules of a stack, from the shards of each."""
    parts = [rule.layout.to_hf(rule.layout.unshard(of_rule)) for rule, of_rule in zip(rules, shards, strict=True)]
    return parts[0] if rules[0].stack is None else [torch.stack(places) for places in zip(*parts, strict=True)]


def named_parameters(model: Model) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters under global names. The last stage's copy of a tied embedding goes by the embedding's name."""
    return {name: tensor for name, tensor in _named_state(model).items() if isinstance(tensor, torch.nn.Parameter)}


def _named_state(model: Model) -> dict[str, Tensor]:
    """The same with the buffers that belong to the model: the biases that correct the choice of experts."""
    named: dict[str, Tensor] = {}
    for chunk in model.chunks:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias"))
        for local_name, parameter in itertools.chain(chunk.named_parameters(), biases):
            name = _global_name(local_name, chunk, model)
            if name == "output_layer.weight" and model.ties_output:
                name = "embedding.word_embeddings.weight"
            named[name] = parameter
    return named


def _global_name(name: str, chunk: torch.nn.Module, model: Model) -> str:
    """Layers and experts numbered over the whole model instead of within this rank."""
    for pattern, replacement in _TRANSFORMER_ENGINE_NAMES:
        name = re.sub(pattern, replacement, name)
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        name = f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}.{name[match.end() :]}"  # type: ignore[union-attr, index]
    if match := re.search(r"\.local_experts\.(\d+)\.", name):
        groups = model.parallel.groups
        first = groups.ep.rank() * (model.config.num_moe_experts // groups.ep.size())  # type: ignore[operator]
        name = f"{name[: match.start()]}.local_experts.{first + int(match[1])}.{name[match.end() :]}"
    return name


def _shard_place(model: Model, rule: Rule) -> tuple[int, int]:
    """(number of shards, this rank's shard) of a parameter."""
    if rule.layout.dim is None or (uses_transformer_engine() and _REPEATED_BY_TRANSFORMER_ENGINE.search(rule.megatron)):
        return 1, 0
    group = model.parallel.groups.expt_tp if rule.group == "expert" else model.parallel.groups.tp
    return group.size(), group.rank()
