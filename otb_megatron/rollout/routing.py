"""Which experts vLLM's routers choose, recorded inside a worker process.

vLLM returns them itself (`enable_return_routed_experts`) from its second model runner, which needs Triton kernels and therefore a GPU: on
a CPU it refuses the setting. There its own capturing code is driven from here, around the first model runner's `execute_model`; upstream
has no hook for that.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

# vLLM's name of a sequence: the number among several responses, the caller's request, eight random characters.
_SEQUENCE = re.compile(r"(?:(\d+)_)?(\d+)-\w{8}")


class RoutingRecorder:
    """Keeps the choices of every token that a model runner computes, from its creation on."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer, bind_routed_experts_capturer

        config = runner.vllm_config
        assert not config.cache_config.enable_prefix_caching, "tokens taken from a cache are not routed again"
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(runner.get_model(), self._capturer)
        self._records: dict[str, list[tuple[int, np.ndarray]]] = {}  # sequence -> (position of its first token, [tokens, layers, experts per token])
        self._execute = runner.execute_model
        runner.execute_model = self._execute_and_record

    def _execute_and_record(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._execute(scheduler_output, *args, **kwargs)
        choices = self._capturer.snapshot_routing_data(scheduler_output.total_num_scheduled_tokens).numpy()
        first = 0
        for sequence in self._runner.input_batch.req_ids:
            if count := scheduler_output.num_scheduled_tokens.get(sequence, 0):
                position = self._runner.requests[sequence].num_computed_tokens
                self._records.setdefault(sequence, []).append((position, choices[first : first + count]))
                first += count
        return result

    def take(self) -> dict[tuple[int, int], np.ndarray]:
        """(request, response) -> uint8 or uint16 [tokens, layers, experts per token], of all sequences since the last call."""
        records = {_request_and_response(sequence): _joined(sequence, parts) for sequence, parts in self._records.items()}
        self._records = {}
        return records


def _request_and_response(sequence: str) -> tuple[int, int]:
    match = _SEQUENCE.fullmatch(sequence)
    if match is None:
        raise RuntimeError(f"vLLM names a sequence {sequence!r}, from which its request cannot be told")
    return int(match[2]), int(match[1] or 0)


def _joined(sequence: str, parts: list[tuple[int, np.ndarray]]) -> np.ndarray:
    """What was computed again, after a sequence was pushed out of the cache, replaces what was there."""
    length = max(position + len(choices) for position, choices in parts)
    joined = np.empty((length, *parts[0][1].shape[1:]), parts[0][1].dtype)
    known = np.zeros(length, bool)
    for position, choices in parts:
        joined[position : position + len(choices)] = choices
        known[position : position + len(choices)] = True
    if not known.all():
        raise RuntimeError(f"{length - known.sum()} of {length} tokens of sequence {sequence} have no routed experts")
    return joined
