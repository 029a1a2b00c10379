"""The samples of a step on disk, so that a run can be replayed without an engine."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otb_megatron.types import Prompt, Response, RoutedExperts, Sample, UserError


def save_rollouts(directory: Path, step: int, samples: Sequence[Sample], *, num_drawn: int | None = None) -> Path:
    """Writes the samples of a step as one JSON Lines file: the prompts in the first line, then a sample a line.

    Numbers survive exactly. The file appears whole or not at all.

    Args:
        num_drawn: prompts that the step took from their order, those that dynamic sampling dropped included; None where no order is known.

    Raises:
        UserError: a prompt's ground truth or extra information is nothing that JSON holds.
        OSError: the disk is full or the directory cannot be written.
    """
    prompts = list({id(sample.prompt): sample.prompt for sample in samples}.values())
    index = {id(prompt): position for position, prompt in enumerate(prompts)}
    drawn = {} if num_drawn is None else {"num_drawn": num_drawn}
    lines: list[dict[str, Any]] = [{"step": step, "num_samples": len(samples), **drawn, "prompts": [dataclasses.asdict(prompt) for prompt in prompts]}]
    for sample in samples:
        response = dataclasses.asdict(sample.response)
        if experts := response["routed_experts"]:
            experts["data"] = base64.b64encode(experts["data"]).decode()
        greedy = {} if sample.greedy_reward is None else {"greedy_reward": sample.greedy_reward}
        lines.append({"prompt": index[id(sample.prompt)], "group": sample.group, "reward": sample.reward, **greedy, "response": response})
    try:
        text = "".join(json.dumps(line) + "\n" for line in lines)
    except TypeError as error:
        raise UserError(f"rollout.save cannot write the samples of step {step}: {error}; ground truth and extra information must be plain JSON") from error
    directory.mkdir(parents=True, exist_ok=True)
    path = _path(directory, step)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_rollouts(directory: Path, step: int) -> list[Sample]:
    """Reads what `save_rollouts` wrote.

    Raises:
        UserError: the file is missing or no such recording.
    """
    path = _path(directory, step)
    try:
        header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        prompts = [_prompt(values) for values in header["prompts"]]
        samples = [Sample(prompts[line["prompt"]], _response(line["response"]), line["group"], line["reward"], line.get("greedy_reward")) for line in lines]
        complete = (header["step"], header["num_samples"]) == (step, len(samples))
    except FileNotFoundError as error:
        raise UserError(f"no samples of step {step}: {path} does not exist; it is written by a run with rollout.save=true") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path} is no recording of samples: {type(error).__name__}: {error}") from error
    if not complete:
        raise UserError(f"{path} announces {header['num_samples']} samples of step {header['step']} and holds {len(samples)} of step {step}")
    return samples


def num_prompts_drawn(directory: Path, step: int) -> int | None:
    """How many prompts a step took from their order, of a recording that `load_rollouts` reads; None where it does not say."""
    with _path(directory, step).open(encoding="utf-8") as file:
        count: int | None = json.loads(file.readline()).get("num_drawn")
    return count


def _path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.jsonl"


def _prompt(values: dict[str, Any]) -> Prompt:
    return Prompt(**values | {"messages": tuple(values["messages"]), "token_ids": tuple(values["token_ids"])})


def _response(values: dict[str, Any]) -> Response:
    experts = values.get("routed_experts")  # a dense model has none
    record = experts and RoutedExperts(experts["dtype"], tuple(experts["shape"]), base64.b64decode(experts["data"]))
    return Response(**values | {"token_ids": tuple(values["token_ids"]), "log_probs": tuple(values["log_probs"]), "routed_experts": record})
