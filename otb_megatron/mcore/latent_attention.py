"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): what Megatron-Core's needs for packed sequences and for its gradient."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from torch import Tensor

from otb_megatron.mcore.attention import PackedRotaryEmbedding
from otb_megatron.weights.rope import Rope


class LatentRotaryEmbedding(PackedRotaryEmbedding):
    """Angles for every row of a pack, and the factor of cosine and sine, which MLASelfAttention asks its embedding for."""

    def __init__(self, rope: Rope, cp_group: dist.ProcessGroup) -> None:
        super().__init__(rope, cp_group)
        self.attention_factor = rope.attention_factor

    def forward(self, max_seq_len: Any, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> tuple[Tensor, float]:  # type: ignore[override]
        return super().forward(max_seq_len, offset), self.attention_factor


class LatentSelfAttention(MLASelfAttention):
    """MLASelfAttention whose rotated key gets its whole gradient under tensor parallelism without Transformer Engine."""

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The modules that the spec names. Megatron-Core's own choice would normalise the input of a query projection that has no latent."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """-> query latent, and key-value latent beside the rotated key [tokens / tp, 1, kv_lora_rank + rotary dimensions].

        All heads share the rotated key, so its gradient is a sum over the tensor-parallel ranks. Where this layer's columns are cut over
        them, Megatron-Core gathers the columns and keeps each rank's own gradient, without the sum (0.19; measured as a wrong gradient).
        Given whole columns of its own rows, it gathers the rows of the rotated key, and the backward pass of that sums.
        """
        query, both = super()._qkv_down_projection(hidden_states)
        if both.size(-1) < self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim:
            assert self.config.sequence_parallel  # a model of experts has it under tensor parallelism
            both = scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(both))
        return query, both
