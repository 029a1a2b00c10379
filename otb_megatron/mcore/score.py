"""The score of every action, s_t = grad log pi(y_t), with respect to all parameters: its size in each kind of layer, and a sketch of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from otb_megatron.mcore.head import StatisticsHead, as_statistics
from otb_megatron.mcore.model import Model
from otb_megatron.mcore.shards import named_parameters
from otb_megatron.mcore.step import run_chunk
from otb_megatron.ops.count_sketch import CountSketch
from otb_megatron.types import Microbatch, PolicyStatistics
from otb_megatron.weights.kinds import LAYER_KINDS, layer_kind


@dataclass(frozen=True)
class Scores:
    """Of the actions of one response, on the CPU."""

    statistics: PolicyStatistics  # [actions]
    squared_norm: Tensor  # float64 [kinds, actions], |s_t|^2 within the parameters of each kind
    cumulative_squared_norm: Tensor  # float64 [kinds, actions], |sum_{j <= t} s_j|^2
    sketch: Tensor  # float32 [actions, sketch size], whose inner products estimate those of whole scores


class ScoreProbe:
    """Differentiates log-probs one action at a time. The model must lie on this rank as a whole."""

    def __init__(self, model: Model, *, temperature: float, sketch_size: int, seed: int) -> None:
        """
        Args:
            temperature: of the sampling distribution.
            sketch_size: numbers kept of each score; at least the number of parameters keeps it whole.
            seed: of the sketch; ranks that take inner products of each other's sketches need the same.
        """
        (self._chunk,) = model.wrapped_chunks()
        # Training mode adds load-balancing gradients to those of log pi, and recomputes activations for each of them.
        self._chunk.eval()
        self._model, self._head = model, StatisticsHead(model.hf.vocab_size, temperature)
        by_kind: dict[str, list[torch.nn.Parameter]] = {}
        for name, parameter in named_parameters(model).items():
            by_kind.setdefault(layer_kind(name, tied=model.hf.tied), []).append(parameter)
        self.kinds = tuple(kind for kind in LAYER_KINDS if kind in by_kind)
        self._parameters = [parameter for kind in self.kinds for parameter in by_kind[kind]]  # those of a kind side by side
        self._sizes = [sum(parameter.numel() for parameter in by_kind[kind]) for kind in self.kinds]
        self.num_parameters = sum(self._sizes)
        self.sketch = CountSketch(self.num_parameters, sketch_size, seed=seed, device=model.parallel.device)

    def measure(self, microbatch: Microbatch) -> Scores:
        """One forward pass and a backward pass for each action.

        Args:
            microbatch: one response with its prompt.
        """
        output, _ = run_chunk(self._model, self._chunk, microbatch, self._head)
        num_actions = output.size(1)
        squared_norm = torch.zeros(len(self.kinds), num_actions, dtype=torch.float64)
        cumulative = torch.zeros_like(squared_norm)
        sketch = torch.empty(num_actions, self.sketch.size)
        so_far = torch.zeros(self.num_parameters, device=output.device)
        for action in range(num_actions):
            score = self._differentiate(output[0, action], last=action == num_actions - 1)
            so_far += score
            squared_norm[:, action] = self._squared_norms(score)
            cumulative[:, action] = self._squared_norms(so_far)
            sketch[action] = self.sketch(score)
        return Scores(as_statistics(output.detach().cpu()), squared_norm, cumulative, sketch)

    def _differentiate(self, log_prob: Tensor, last: bool) -> Tensor:
        """float32 [num_parameters]: the gradient of one log-prob. Parameters that it does not depend on (experts not chosen) have 0."""
        for parameter in self._parameters:
            parameter.grad = None
        log_prob.backward(retain_graph=not last)
        gradients = (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self._parameters)
        return torch.cat([gradient.flatten().float() for gradient in gradients])

    def _squared_norms(self, values: Tensor) -> Tensor:
        """[num_parameters] -> [kinds]"""
        return torch.stack([torch.dot(part, part) for part in values.split(self._sizes)])
