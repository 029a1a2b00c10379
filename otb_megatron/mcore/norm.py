"""RMSNorm for layer specs without Transformer Engine: Megatron's own wrapper of torch's norm refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight, normalised in float32 and cast before the scale, as transformers does it (bit-equal in bfloat16)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of parameters with this mark over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., hidden_size] -> the same shape and dtype."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)
