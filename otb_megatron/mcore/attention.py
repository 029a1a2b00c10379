"""Packed causal attention and rotary embedding for layer specs without Transformer Engine.

Sequences of a pack attend to themselves only. Instead of a [tokens, tokens] mask, sequences of similar length are put
side by side as a batch, so that the cost is that of the sequences and not of the pack squared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from otb_megatron.mcore.platform import uses_transformer_engine
from otb_megatron.ops.context_parallel import local_rows
from otb_megatron.types import Microbatch


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences of similar length, side by side. Padding repeats row 0 and is never read back."""

    query_rows: Tensor  # int64 [sequences, queries] rows of this rank's queries
    key_rows: Tensor  # int64 [sequences, keys] rows of the gathered keys and values
    visible: Tensor | None  # bool [sequences, 1, queries, keys]; None where plain causal order says it all
    kept: Tensor  # bool [sequences, queries], False for padding


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack (global, padded offsets) with what the local attention and rotary embedding need."""

    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [padded_tokens], whole sequences
    local_rows: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [tokens / cp], rows of the whole pack that this rank holds
    attention_batches: list[AttentionBatch] = field(default_factory=list)
    attended_rows: Tensor = field(default_factory=lambda: torch.empty(0))  # int64 [tokens / cp], where each row stands in the batches' kept rows

    @classmethod
    def of(cls, microbatch: Microbatch, cp_size: int, cp_rank: int, device: torch.device) -> PackedSequences:
        offsets = microbatch.cu_seqlens.to(device)
        own_attention = not uses_transformer_engine()
        batches = _attention_batches(microbatch.cu_seqlens, cp_size, cp_rank, device) if own_attention else []
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
            attention_batches=batches,
            attended_rows=torch.cat([batch.query_rows[batch.kept] for batch in batches]).argsort() if own_attention else torch.empty(0),
        )


def _attention_batches(cu_seqlens: Tensor, cp_size: int, cp_rank: int, device: torch.device) -> list[AttentionBatch]:
    """Groups the pack's sequences by length: a group's longest is less than twice its shortest, so under half of a batch is padding."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    # Keys arrive gathered rank after rank; find where each row of the whole pack stands among them.
    gathered = torch.cat([local_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    row_of_position = torch.empty_like(gathered)
    row_of_position[gathered] = torch.arange(gathered.numel())
    own = local_rows(cu_seqlens, cp_size, cp_rank)  # position in the pack of each of this rank's rows
    own_offsets = (cu_seqlens // cp_size).tolist()
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        groups.setdefault(length.bit_length(), []).append(sequence)
    return [
        _attention_batch([(int(cu_seqlens[s]), lengths[s], own_offsets[s]) for s in sequences], own, row_of_position, cp_size, device)
        for _, sequences in sorted(groups.items())
    ]


def _attention_batch(sequences: list[tuple[int, int, int]], own: Tensor, row_of_position: Tensor, cp_size: int, device: torch.device) -> AttentionBatch:
    longest = max(length for _, length, _ in sequences)
    num_queries = longest // cp_size
    query_rows = torch.zeros(len(sequences), num_queries, dtype=torch.int64)
    key_rows = torch.zeros(len(sequences), longest, dtype=torch.int64)
    kept = torch.zeros(len(sequences), num_queries, dtype=torch.bool)
    query_position = torch.zeros(len(sequences), num_queries, dtype=torch.int64)
    for i, (start, length, own_start) in enumerate(sequences):
        count = length // cp_size
        query_rows[i, :count] = torch.arange(own_start, own_start + count)
        query_position[i, :count] = own[own_start : own_start + count] - start
        kept[i, :count] = True
        key_rows[i, :length] = row_of_position[start : start + length]
    visible = None
    if cp_size > 1:
        # Padding keys lie behind every real query, and a padding query sees key 0, so no row is empty.
        visible = (query_position[:, :, None] >= torch.arange(longest))[:, None].to(device)
    return AttentionBatch(query_rows.to(device), key_rows.to(device), visible, kept.to(device))


class PackedDotProductAttention(MegatronModule):
    """Megatron's `core_attention` for packed sequences, with grouped queries and context parallelism.

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
        assert isinstance(packed_seq_params, PackedSequences), "the local attention works on packed sequences only"
        if self.cp_group.size() > 1:
            both = gather_from_sequence_parallel_region(torch.cat([key, value], -1).contiguous(), group=self.cp_group)
            key, value = both.split([key.size(-1), value.size(-1)], -1)
        attended = [self._attend(query, key, value, batch) for batch in packed_seq_params.attention_batches]
        return torch.cat(attended).index_select(0, packed_seq_params.attended_rows)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, batch: AttentionBatch) -> Tensor:
        """-> [kept rows of the batch, heads d]."""
        q = _side_by_side(query, batch.query_rows)  # [sequences, heads, queries, d]
        k, v = (_side_by_side(x, batch.key_rows) for x in (key, value))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=batch.visible, is_causal=batch.visible is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return output.transpose(1, 2)[batch.kept].flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """No parameters, so nothing to save."""
        return {}


def _side_by_side(rows: Tensor, index: Tensor) -> Tensor:
    """rows [rows, heads, d], index [sequences, length] -> [sequences, heads, length, d]."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles for every row of a pack.

    Megatron's unfused `thd` path otherwise rotates one sequence after the other with in-place copies, whose backward
    pass grows with the square of the number of sequences. Given angles for the whole pack it does one rotation.
    """

    def get_rotary_seq_len(self, *args: Any, packed_seq_params: PackedSequences | None = None, **kwargs: Any) -> Any:
        """What GPTModel hands to `forward`: the pack instead of a length."""
        return packed_seq_params if packed_seq_params is not None else args[4]

    def forward(self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """-> [padded_tokens, 1, 1, d], the angles of each row's position in its own sequence."""
        pack: PackedSequences = max_seq_len
        return self.get_emb(pack.max_seqlen_q, offset)[pack.position_ids]
