"""One vLLM engine, as the class of a Ray actor."""

from __future__ import annotations

import dataclasses
import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from otb_megatron.types import RoutedExperts, UserError


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as vLLM gave it, not yet checked."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str | None
    weight_versions: tuple[str, ...]  # one for each stretch of tokens sampled by one set of weights
    routed_experts: RoutedExperts | None = None  # where the engine was asked for them


class Engine:
    """Samples from one copy of the policy. vLLM patches torch in its process, so nothing of the trainer ever runs there.

    The constructor does nothing: an exception of an actor's constructor reaches the caller as text only.
    """

    def start(self, arguments: dict[str, Any], *, record_experts: bool = False) -> None:
        """Loads the model.

        Args:
            arguments: of vLLM's engine.
            record_experts: record the experts of every token here, because this vLLM does not return them itself.

        Raises:
            UserError: vLLM knows an argument not at all, or refuses its value or the model.
        """
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs

        check_known(arguments, {field.name for field in dataclasses.fields(EngineArgs)})
        _register_architectures(Path(arguments["model"]))
        try:
            self._llm = LLM(**arguments)
        except ValueError as error:
            raise UserError(f"vLLM refuses the model or its settings: {error}") from error
        self._holds_update = False  # received whole, not yet switched to
        self._records_experts = record_experts
        if record_experts:
            self._llm.collective_rpc("record_routed_experts")

    def generate(self, prompts: list[tuple[int, ...]], seeds: list[int] | None, sampling: dict[str, Any]) -> list[list[Completion]]:
        """Samples for each prompt.

        Args:
            prompts: token ids.
            seeds: one a prompt, or None for the engine's own random state.
            sampling: arguments of vLLM's SamplingParams.
        """
        from vllm import SamplingParams

        # logprobs=0 is the sampled token's log-prob and no other.
        fixed = {"logprobs": 0, "flat_logprobs": True, "detokenize": False}
        parameters = [SamplingParams(**sampling, **fixed, seed=seed) for seed in seeds or [None] * len(prompts)]
        outputs = self._llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
        recorded: dict[tuple[int, int], np.ndarray] = self._llm.collective_rpc("take_routed_experts")[0] if self._records_experts else {}
        return [[_completion(output, recorded.get((int(request.request_id), output.index))) for output in request.outputs] for request in outputs]

    def connect(self, connection: dict[str, Any]) -> None:
        """Joins the transfer group; returns once all have joined."""
        self._llm.init_weight_transfer_engine({"init_info": connection})

    def receive_weights(self, delivery: dict[str, Any]) -> None:
        """Takes a whole update. It is not used before `finish_weights`."""
        if self._holds_update:  # the pool gave the last one up, since another engine failed; vLLM must close it all the same
            self._llm.finish_weight_update()
            self._holds_update = False
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": delivery})
        self._holds_update = True

    def finish_weights(self, version: int) -> None:
        """Switches to the weights received last."""
        self._llm.finish_weight_update(str(version))
        self._holds_update = False
        # vLLM keeps the key-value cache of prompts it has seen; those entries were computed with the old weights.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so responses would mix old and new weights")

    def name_weights(self, version: int) -> None:
        """Gives the weights loaded from the checkpoint their version."""
        self._llm.update_weight_version(str(version))

    def close(self) -> None:
        """Stops vLLM's worker processes and frees their shared memory, which outlives a killed actor."""
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()


def _register_architectures(model_dir: Path) -> None:
    """Shows vLLM the model's class.

    It would look at it in a process of its own, which takes 12 s the first time, so as not to touch a GPU before it forks;
    inside a Ray actor it never forks.
    """
    from vllm import ModelRegistry

    for name in json.loads((model_dir / "config.json").read_text())["architectures"]:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def check_known(arguments: dict[str, Any], known: set[str]) -> None:
    """Raises UserError for names that are no arguments of this vLLM's engine."""
    lines = []
    for name in sorted(arguments.keys() - known):
        near = difflib.get_close_matches(name, known, n=1)
        lines.append(f"rollout.vllm.{name}: vLLM's engine has no such argument" + (f"; did you mean {near[0]!r}?" if near else ""))
    if lines:
        raise UserError("\n".join(lines))


def _completion(output: Any, recorded: np.ndarray | None) -> Completion:
    token_ids = tuple(output.token_ids)
    if tuple(output.logprobs.token_ids) != token_ids:
        raise RuntimeError(f"vLLM gave log-probs of {len(output.logprobs.token_ids)} other tokens than the {len(token_ids)} sampled ones")
    versions = tuple(span.version for span in output.weight_versions or ())
    experts = output.routed_experts if recorded is None else recorded
    record = None if experts is None else RoutedExperts.of(experts)
    return Completion(token_ids, tuple(output.logprobs.logprobs), output.finish_reason, versions, record)
