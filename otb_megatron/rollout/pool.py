"""All engines as one: prompts in, checked responses out, and new weights for everyone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import Tensor
from transformers import AutoTokenizer

from otb_megatron.config import RolloutConfig
from otb_megatron.rollout import cluster
from otb_megatron.rollout.calls import Deadline, wait_for_all
from otb_megatron.rollout.engine import Completion, Engine
from otb_megatron.rollout.options import end_tokens, engine_arguments
from otb_megatron.rollout.sender import WeightSender
from otb_megatron.rollout.transfer import TensorMetadata
from otb_megatron.types import Prompt, Response, UserError

NO_WEIGHTS = -1


class RolloutPool:
    """vLLM engines as Ray actors, used by the trainer's rank 0 alone.

    Usable as a context manager. Generation and weight transfer never overlap: each call returns when all engines are done.
    """

    def __init__(self, config: RolloutConfig, *, model_dir: Path, dtype: str, max_prompt_tokens: int, load_weights: bool):
        """Starts Ray (or joins the cluster at `config.ray_address`) and the engines, and waits until they are ready.

        Args:
            model_dir: Hugging Face model directory: architecture, tokenizer and, if they are to be loaded, weights.
            dtype: of the engines' weights and activations, "float32" or "bfloat16".
            max_prompt_tokens: longest prompt that will come.
            load_weights: load the weights of `model_dir` as version 0. Without it the engines start with none, and
                `send_weights` must come before `generate`.

        Raises:
            UserError: an argument of vLLM cannot be used, the machine has too few GPUs, or an engine is not ready in time.
            RuntimeError: an engine failed to start; the message is vLLM's.
        """
        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self._end_tokens = end_tokens(model_dir, self._tokenizer.eos_token_id)
        self._max_prompt_tokens = max_prompt_tokens
        self.policy_version = NO_WEIGHTS
        on_gpu = torch.cuda.is_available()
        arguments = engine_arguments(
            config,
            model_dir=model_dir,
            dtype=dtype,
            max_model_tokens=max_prompt_tokens + config.max_response_tokens,
            load_weights=load_weights,
            on_gpu=on_gpu,
        )
        self._max_model_tokens = arguments["max_model_len"]
        self._engines: dict[str, Any] = {}
        self._sender: WeightSender | None = None
        cluster.enter(config.ray_address, gpus=config.num_engines * config.tensor_parallel_size * on_gpu, cpus=config.num_engines)
        try:
            self._start_engines(arguments, on_gpu)
            if load_weights:
                calls = {name: engine.name_weights.remote(0) for name, engine in self._engines.items()}
                wait_for_all(calls, Deadline(config.start_timeout_s, "rollout.start_timeout_s"), "naming their weights")
                self.policy_version = 0
        except BaseException:
            self.close()
            raise

    def _start_engines(self, arguments: dict[str, Any], on_gpu: bool) -> None:
        config = self._config
        actor = ray.remote(Engine).options(
            num_cpus=1,
            num_gpus=config.tensor_parallel_size if on_gpu else 0,
            runtime_env={"env_vars": _environment(config, compiles=on_gpu or not arguments["enforce_eager"])},
        )
        self._engines = {f"engine {index}": actor.remote() for index in range(config.num_engines)}
        record_experts = config.router_replay and not on_gpu  # on a GPU vLLM returns them itself
        calls = {
            name: engine.start.remote(arguments | {"seed": config.seed + index}, record_experts=record_experts)
            for index, (name, engine) in enumerate(self._engines.items())
        }
        wait_for_all(calls, Deadline(config.start_timeout_s, "rollout.start_timeout_s"), "starting")
        self._sender = WeightSender(
            self._engines,
            workers_per_engine=config.tensor_parallel_size,
            bucket_bytes=config.weight_transfer_bucket_bytes,
            timeout_s=config.weight_transfer_timeout_s,
            device=torch.device("cuda" if on_gpu else "cpu"),
        )

    def generate(self, prompts: Sequence[Prompt], *, n: int, temperature: float, max_response_tokens: int, seed: int | None) -> list[list[Response]]:
        """Samples `n` responses to each prompt from the whole vocabulary at `temperature`.

        Args:
            n: 1 where `temperature` is 0.
            temperature: 0 takes the most probable token; log-probs are then those at temperature 1.
            seed: makes the responses independent of the number of engines and of what was sampled before, at the price
                of sampling each sequence on its own; None draws from the engines' own random states.

        Returns:
            For each prompt, in order, its `n` responses. The token that ends a response is part of it.

        Raises:
            UserError: a prompt is too long, an engine died, or the deadline passed; the message names the engines and prompts.
            RuntimeError: no whole set of weights is loaded, an engine failed, or its answer lacks something.
        """
        if self.policy_version == NO_WEIGHTS:
            raise RuntimeError("the engines hold no whole set of weights: call send_weights first")
        if temperature == 0 and n != 1:
            raise ValueError(f"n={n} greedy responses would be equal; ask for one")
        if 0 < temperature < 0.01:
            raise UserError(f"rollout.temperature={temperature}: below 0.01 vLLM samples at 0.01, another distribution than the trained one")
        self._check_lengths(prompts, max_response_tokens)
        sampling = {"n": n, "temperature": temperature, "max_tokens": max_response_tokens, "stop_token_ids": self._end_tokens}
        seeds = None if seed is None else [_prompt_seed(seed, position) for position in range(len(prompts))]
        shares = {name: range(index, len(prompts), len(self._engines)) for index, name in enumerate(self._engines)}
        calls, owners = {}, []
        for name, share in shares.items():
            if not share:
                continue
            label = f"{name} ({len(share)} prompts, ids {_shorten([prompts[position].id for position in share])})"
            own_seeds = None if seeds is None else [seeds[position] for position in share]
            calls[label] = self._engines[name].generate.remote([prompts[position].token_ids for position in share], own_seeds, sampling)
            owners.append((label, share))
        answers = wait_for_all(calls, Deadline(self._config.generate_timeout_s, "rollout.generate_timeout_s"), "generating")
        responses: list[list[Response]] = [[] for _ in prompts]
        for (label, share), answer in zip(owners, answers, strict=True):
            if len(answer) != len(share):
                raise RuntimeError(f"{label} answered {len(answer)} of {len(share)} prompts")
            for position, completions in zip(share, answer, strict=True):
                responses[position] = self._responses(prompts[position], completions, n)
        return responses

    def _check_lengths(self, prompts: Sequence[Prompt], max_response_tokens: int) -> None:
        too_long = [prompt for prompt in prompts if len(prompt.token_ids) > self._max_prompt_tokens]
        if too_long:
            lines = [f"  prompt {prompt.id} of {prompt.data_source}: {len(prompt.token_ids)} tokens" for prompt in too_long]
            raise UserError(f"{len(too_long)} prompt(s) exceed data.max_prompt_tokens={self._max_prompt_tokens}:\n" + "\n".join(lines))
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest + max_response_tokens > self._max_model_tokens:
            raise UserError(f"{longest} prompt tokens and {max_response_tokens} response tokens exceed the engines' max_model_len={self._max_model_tokens}")

    def _responses(self, prompt: Prompt, completions: Sequence[Completion], n: int) -> list[Response]:
        if len(completions) != n:
            raise RuntimeError(f"prompt {prompt.id}: {len(completions)} of {n} responses came")
        token_ids = [list(completion.token_ids) for completion in completions]
        if self._config.router_replay:
            check_records(prompt, completions)
        texts = self._tokenizer.batch_decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return [checked_response(prompt.id, completion, text) for completion, text in zip(completions, texts, strict=True)]

    def send_weights(self, metadata: Sequence[TensorMetadata], tensors: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Gives every engine new weights and returns when all sample from them, with their prefix caches emptied.

        An update is always the whole model. `tensors` is consumed while the engines receive, a bucket at a time.

        Args:
            metadata: every tensor in the order of sending, with names, shapes and dtypes of the Hugging Face checkpoint. The
                engines convert to their own dtype.
            tensors: name and value of each, on any device.
            version: not negative; responses carry it from now on.

        Raises:
            ValueError: `tensors` and `metadata` differ.
            UserError: an engine died, or the deadline passed.
            RuntimeError: an engine failed, for example because parameters of the model are missing in `metadata`. After any
                failure the engines hold no whole set of weights until a later call succeeds.
        """
        if version < 0:
            raise ValueError(f"policy version {version} is negative")
        self.policy_version = NO_WEIGHTS
        self._sender.send(metadata, tensors, version)
        self.policy_version = version

    def close(self) -> None:
        """Stops the engines and leaves Ray, which ends if it was started here. May be called twice."""
        if self._sender is not None:
            self._sender.disconnect()
            self._sender = None
        # An engine that died or hangs cannot say goodbye; its process is ended below in any case.
        with contextlib.suppress(RayError):
            ray.get([engine.close.remote() for engine in self._engines.values()], timeout=10)
        for engine in self._engines.values():
            ray.kill(engine)
        self._engines = {}
        ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def checked_response(prompt_id: int, completion: Completion, text: str) -> Response:
    """Turns what vLLM gave into a Response; raises RuntimeError where something is missing, since nothing can be filled in."""
    where = f"prompt {prompt_id}: a response of {len(completion.token_ids)} tokens"
    if not completion.token_ids:
        raise RuntimeError(f"prompt {prompt_id}: an empty response")
    if len(completion.log_probs) != len(completion.token_ids):
        raise RuntimeError(f"{where} came with {len(completion.log_probs)} log-probs")
    if not np.isfinite(completion.log_probs).all():
        raise RuntimeError(f"{where} has log-probs that are not finite")
    if completion.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"{where} ended with the unknown reason {completion.finish_reason!r}")
    if len(completion.weight_versions) != 1 or not completion.weight_versions[0].isdecimal():
        raise RuntimeError(f"{where} was sampled by weight versions {completion.weight_versions}, not by one that was sent")
    version = int(completion.weight_versions[0])
    return Response(completion.token_ids, completion.log_probs, text, completion.finish_reason, version, completion.routed_experts)


def check_records(prompt: Prompt, completions: Sequence[Completion]) -> None:
    """Raises RuntimeError where a token that was computed has no routed experts. The last token of a response never was."""
    for completion in completions:
        expected = len(prompt.token_ids) + len(completion.token_ids) - 1
        found = completion.routed_experts.shape[0] if completion.routed_experts else 0
        if found != expected:
            raise RuntimeError(f"prompt {prompt.id}: routed experts of {found} tokens came with a response that has {expected} to replay")


def _environment(config: RolloutConfig, *, compiles: bool) -> dict[str, str]:
    """Environment of an engine's process and of the workers that it starts."""
    threads = max(1, (os.cpu_count() or 1) // (config.num_engines * config.tensor_parallel_size))
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # threads that spin while they wait make an engine ten times slower on cores that others use too
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in the actor itself: one process less, and faster to start
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM's choice refuses two workers on one NUMA node
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not compiles:
        variables["TORCHDYNAMO_DISABLE"] = "1"  # small functions of vLLM's sampler are compiled even in eager mode, for 20 s in the first step
    return variables


def _prompt_seed(seed: int, position: int) -> int:
    """vLLM adds 0 to n - 1 to it for the responses of one prompt, so neighbouring prompts must lie far apart."""
    return int(np.random.SeedSequence([seed, position]).generate_state(1, np.uint64)[0] >> np.uint64(2))


def _shorten(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids[:8])) + (", ..." if len(ids) > 8 else "")
