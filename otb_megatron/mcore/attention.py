"""Packed causal attention and rotary embedding for layer specs without Transformer Engine.

Sequences of a pack attend to themselves only. Instead of a [tokens, tokens] mask, sequences of similar length are put
side by side as a batch, so that the cost is that of the sequences and not of the pack squared. The shape in which a sequence
is computed depends on its own length alone, and so does every bit of its result: a neighbour in the pack changes nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from otb_megatron.mcore.platform import uses_transformer_engine
from otb_megatron.ops.context_parallel import local_rows, sequence_order
from otb_megatron.types import Microbatch
from otb_megatron.weights.rope import Rope

LENGTHS_PER_OCTAVE = 4  # at most a fifth of a batch is padding, and a pack of ordinary lengths has some twenty batches


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences of similar length, side by side."""

    num_sequences: int
    num_queries: int  # per sequence, padding included
    num_keys: int
    visible: Tensor | None  # bool [sequences, 1, queries, keys], in layers without a window; None where plain causal order says it all
    in_window: Tensor | None  # the same in layers with one; None if no layer has one


@dataclass(frozen=True)
class AttentionPlan:
    """How the rows of a pack become the batches' rows, and back. Padding repeats row 0 and is never read back."""

    batches: list[AttentionBatch]
    query_rows: Tensor  # int64 [queries of all batches], rows of this rank's queries
    key_rows: Tensor  # int64 [keys of all batches], rows of the gathered keys and values
    attended_rows: Tensor  # int64 [tokens / cp], where each of this rank's rows stands among the queries of all batches

    @classmethod
    def of(cls, cu_seqlens: Tensor, cp_size: int, cp_rank: int, device: torch.device, *, window: int | None, sinks: bool) -> AttentionPlan:
        """
        Args:
            cu_seqlens: int32 [sequences + 1], padded and of the whole pack.
            window: how many tokens before it a token sees in the layers with a window; None: no layer has one.
            sinks: whether one key more stands behind the keys of each sequence, seen by every query.
        """
        bounds = cu_seqlens.tolist()
        # Keys arrive gathered rank after rank; find where each row of the whole pack stands among them.
        row_of_position = sequence_order(cu_seqlens, cp_size)
        position = local_rows(cu_seqlens, cp_size, cp_rank)  # in the pack, of each of this rank's rows
        by_length: dict[int, list[int]] = {}
        for sequence, (first, last) in enumerate(itertools.pairwise(bounds)):
            by_length.setdefault(batch_length((last - first) // cp_size), []).append(sequence)
        batches, query_rows, key_rows, kept = [], [], [], []
        for num_queries, sequences in sorted(by_length.items()):
            num_keys = num_queries * cp_size
            queries = torch.zeros(len(sequences), num_queries, dtype=torch.int64)
            keys = torch.zeros(len(sequences), num_keys, dtype=torch.int64)
            order = torch.zeros(len(sequences), num_queries, dtype=torch.int64)  # each query's position in its sequence
            own = torch.zeros(len(sequences), num_queries, dtype=torch.bool)
            for i, sequence in enumerate(sequences):
                first, last = bounds[sequence], bounds[sequence + 1]
                rows = torch.arange(first // cp_size, last // cp_size)
                queries[i, : rows.numel()], own[i, : rows.numel()] = rows, True
                order[i, : rows.numel()] = position[rows] - first
                keys[i, : last - first] = row_of_position[first:last]
            # Padding keys lie behind every real query, and a padding query sees key 0, so no row is empty.
            visible = _visible_keys(order, num_keys, None, sinks).to(device) if sinks or cp_size > 1 else None
            in_window = None if window is None else _visible_keys(order, num_keys, window, sinks).to(device)
            batches.append(AttentionBatch(len(sequences), num_queries, num_keys, visible, in_window))
            query_rows.append(queries.flatten())
            key_rows.append(keys.flatten())
            kept.append(own.flatten())
        all_queries = torch.cat(query_rows)
        at = torch.cat(kept).nonzero().flatten()
        return cls(batches, all_queries.to(device), torch.cat(key_rows).to(device), at[all_queries[at].argsort()].to(device))


def _visible_keys(order: Tensor, num_keys: int, window: int | None, sinks: bool) -> Tensor:
    """order [sequences, queries], each query's position -> bool [sequences, 1, queries, keys], or one key more with sinks."""
    visible = order[:, :, None] >= torch.arange(num_keys)
    if window is not None:
        visible &= order[:, :, None] <= torch.arange(num_keys) + window
    return F.pad(visible, (0, int(sinks)), value=True)[:, None]


def batch_length(length: int) -> int:
    """The next of a few fixed lengths, LENGTHS_PER_OCTAVE between a power of two and the next: 1 ... 8, 10, 12, 14, 16, 20, ..."""
    step = max(1, 2 ** (length - 1).bit_length() // (2 * LENGTHS_PER_OCTAVE))
    return -(-length // step) * step


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack (global, padded offsets) with what the local attention and rotary embedding need."""

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [padded_tokens], whole sequences
    local_rows: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [tokens / cp], rows of the whole pack that this rank holds
    attention: AttentionPlan | None = None  # None with Transformer Engine, whose attention needs no plan

    @classmethod
    def of(cls, microbatch: Microbatch, config: TransformerConfig, cp_size: int, cp_rank: int, device: torch.device) -> PackedSequences:
        """The pack for a model of `config`."""
        plan = None
        if not uses_transformer_engine():
            window = config.window_size[0] if config.window_size else None
            plan = AttentionPlan.of(microbatch.cu_seqlens, cp_size, cp_rank, device, window=window, sinks=config.softmax_type == "learnable")
        offsets = microbatch.cu_seqlens.to(device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=microbatch.max_seqlen,
            max_seqlen_kv=microbatch.max_seqlen,
            position_ids=microbatch.position_ids.to(device),
            local_rows=local_rows(microbatch.cu_seqlens, cp_size, cp_rank),
            attention=plan,
        )


class PackedDotProductAttention(MegatronModule):
    """Megatron's `core_attention` for packed sequences, with grouped queries, sliding windows, sinks and context parallelism.

    A sink (TransformerConfig's `softmax_type: learnable`) is a logit of each head that takes its share of the softmax and adds nothing.

    Under context parallelism keys and values are gathered over the group in the forward pass and their gradients
    reduce-scattered in the backward pass; queries stay where they are (Megatron's zigzag order).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and not (attention_dropout or config.attention_dropout)
        assert pg_collection is not None
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.tp_group = pg_collection.tp
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(config.num_attention_heads // self.tp_group.size(), dtype=config.params_dtype))
        self.has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """query [tokens / cp, heads, d], key and value [tokens / cp, groups, d] -> [tokens / cp, heads d]."""
        assert isinstance(packed_seq_params, PackedSequences) and packed_seq_params.attention is not None, "the local attention works on packed sequences only"
        plan = packed_seq_params.attention
        if self.cp_group.size() > 1:
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1).contiguous(), group=self.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], -1)
        # One gather of rows for all batches: the backward pass of each makes a gradient of the size of the pack.
        q = query.index_select(0, plan.query_rows).split([batch.num_sequences * batch.num_queries for batch in plan.batches])
        k, v = (x.index_select(0, plan.key_rows).split([batch.num_sequences * batch.num_keys for batch in plan.batches]) for x in (key, value))
        attended = [self._attend(*rows) for rows in zip(q, k, v, plan.batches, strict=True)]
        return torch.cat(attended).index_select(0, plan.attended_rows)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> Tensor:
        """query [sequences queries, heads, d], key and value [sequences keys, groups, d] -> [sequences queries, heads d]."""
        q = query.unflatten(0, (batch.num_sequences, batch.num_queries)).transpose(1, 2)  # [sequences, heads, queries, d]
        k, v = (x.unflatten(0, (batch.num_sequences, batch.num_keys)).transpose(1, 2) for x in (key, value))
        visible = batch.in_window if self.has_window else batch.visible
        if self.softmax_offset is not None:
            q, k, v = _with_sink(q, k, v, self.softmax_offset / self.scale)
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=visible is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1))
        if self.softmax_offset is not None:
            output = output[..., :-1]
        return output.transpose(1, 2).flatten(0, 1).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The sinks, under Megatron's own name and cut by heads as there."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = dict(tp_group=self.tp_group, dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"])
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)


def _with_sink(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a key whose product with every query of head h is sinks[h], and whose value is zero, so that the kernel need not know of sinks.

    Args:
        query: [sequences, heads, queries, d].
        key, value: [sequences, groups, keys, d].
        sinks: [heads], divided by the scale of the softmax.

    Returns:
        The same with one dimension and, of key and value, one row more. The last dimension of the attended values is to be dropped.
    """
    query = torch.cat([query, sinks.view(-1, 1, 1).expand(*query.shape[:-1], 1)], -1)
    key, value = F.pad(key, (0, 1, 0, 1)), F.pad(value, (0, 1, 0, 1))
    key[..., -1, -1] = 1.0
    return query, key, value


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles for every row of a pack.

    Megatron's unfused `thd` path otherwise rotates one sequence after the other with in-place copies, whose backward
    pass grows with the square of the number of sequences. Given angles for the whole pack it does one rotation.
    """

    def __init__(self, rope: Rope, cp_group: dist.ProcessGroup) -> None:
        super().__init__(kv_channels=2 * rope.inv_freq.numel(), rotary_percent=1.0, use_cpu_initialization=True, cp_group=cp_group)
        self.inv_freq = rope.inv_freq

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any) -> Any:
        """What GPTModel and MLASelfAttention hand to `forward`: the pack instead of a length."""
        return packed_seq_params if packed_seq_params is not None else args[4]

    def forward(self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """-> [padded_tokens, 1, 1, d], the angles of each row's position in its own sequence."""
        pack: PackedSequences = max_seq_len
        return self.get_emb(pack.max_seqlen_q, offset)[pack.position_ids]
