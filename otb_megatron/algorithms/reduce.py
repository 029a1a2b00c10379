"""How per-action losses become one number: weights that depend on the whole batch and not on how it is cut."""

from __future__ import annotations

import torch
from torch import Tensor

from otb_megatron.algorithms.ragged import sample_of_action
from otb_megatron.config import Aggregation


def action_weights(offsets: Tensor, aggregation: Aggregation, length: int | None = None) -> Tensor:
    """Weights such that sum_i weight_i loss_i is the aggregated loss of the batch, under verl's names.

        token-mean                1 / actions
        seq-mean-token-sum        1 / samples
        seq-mean-token-mean       1 / (samples * actions of the sample)
        seq-mean-token-sum-norm   1 / (samples * length)                    Dr.GRPO (arXiv 2503.20783)

    `samples` counts those with at least one action. The weights are known before the first backward pass, so the gradient
    does not depend on micro-batches or ranks; every rank sums its actions and nobody divides.

    Example: lengths 1 and 3 give token-mean (1/4, 1/4, 1/4, 1/4), seq-mean-token-mean (1/2, 1/6, 1/6, 1/6).

    Args:
        offsets: [samples + 1] of the samples of one optimizer step.
        aggregation: one of the above.
        length: the fixed normaliser of seq-mean-token-sum-norm, e.g. rollout.max_response_tokens.

    Returns:
        float32 [actions].
    """
    lengths = offsets.diff().double()
    num_samples = (lengths > 0).sum().double()
    if aggregation == "token-mean":
        denominator = lengths.sum()
    elif aggregation == "seq-mean-token-sum":
        denominator = num_samples
    elif aggregation == "seq-mean-token-mean":
        denominator = num_samples * lengths
    else:
        if length is None:
            raise ValueError("seq-mean-token-sum-norm needs its fixed normaliser `length`")
        denominator = num_samples * length
    return (1 / denominator).expand_as(lengths)[sample_of_action(offsets)].to(torch.float32)
