"""What a parameter is part of, read from its global Megatron name."""

from __future__ import annotations

import re

# In the order of a forward pass. A tied model has one matrix in place of `embedding` and `output`.
LAYER_KINDS = ("embedding", "embedding_and_output", "norm", "attention", "mlp", "router", "experts", "output")
_PATTERNS = (
    (r"^embedding\.", "embedding"),
    (r"^output_layer\.", "output"),
    (r"layernorm\.weight$", "norm"),
    (r"\.self_attention\.", "attention"),
    (r"\.mlp\.router\.", "router"),
    (r"\.mlp\.(shared_)?experts\.", "experts"),
    (r"\.mlp\.linear_fc[12]\.", "mlp"),
)


def layer_kind(name: str, *, tied: bool) -> str:
    """One of LAYER_KINDS.

    Args:
        name: a `Rule.megatron` of the model.
        tied: whether the embedding is the output layer as well.

    Raises:
        ValueError: a parameter of no known kind.
    """
    kind = next((kind for pattern, kind in _PATTERNS if re.search(pattern, name)), None)
    if kind is None:
        raise ValueError(f"{name} is of no layer kind; give it one in weights/kinds.py")
    return "embedding_and_output" if kind == "embedding" and tied else kind
