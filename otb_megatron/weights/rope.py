"""Rotary position embedding as a model's configuration describes it, scaling included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from otb_megatron.types import UserError

_TYPES = ("default", "linear", "llama3", "yarn")
_PARTIAL = ("glm4_moe",)  # families that leave the last dimensions of a head unrotated; transformers' others do not look at the factor, or break on it


@dataclass(frozen=True)
class Rope:
    """The angle of position t in pair i is t * inv_freq[i]; cosine and sine are multiplied by `attention_factor`."""

    inv_freq: Tensor  # float32 [rotary dimensions / 2]; fewer than head_dim / 2 pairs leave the rest of a head unrotated
    attention_factor: float


def rope(config: PreTrainedConfig) -> Rope:
    """The frequencies and the attention factor that transformers computes for `config`.

    Raises:
        UserError: a kind of scaling whose angles depend on the length of the sequence, or parameters that transformers cannot use.
    """
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in _TYPES:
        raise UserError(f"config.json: rope_type {kind!r} in rope_parameters has no mapping to Megatron-Core; known: {', '.join(_TYPES)}")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0 and config.model_type not in _PARTIAL:
        raise UserError(f"config.json: partial_rotary_factor={partial} in rope_parameters has no mapping for {config.model_type}; only 1.0")
    try:
        if kind == "default":
            size = int(config.head_dim * partial)
            return Rope(1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0)
        return Rope(*ROPE_INIT_FUNCTIONS[kind](config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"config.json: rope_parameters {parameters} cannot be used: {type(error).__name__} {error}") from error
