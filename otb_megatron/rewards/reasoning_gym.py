"""Scores by the verifier of the reasoning-gym task that made the prompt."""

from __future__ import annotations

import reasoning_gym as library
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.utils import extract_answer

from otb_megatron.types import Prompt, Response

_tasks: dict[str, ProceduralDataset] = {}  # by name and options, for the life of the worker


def reasoning_gym(prompt: Prompt, response: Response, *, answer_tag: str | None = None) -> float:
    """The task's own `score_answer`, in [0, 1]; many tasks give partial credit.

    Args:
        answer_tag: the answer is what the last `<tag>...</tag>` of the response holds, none without one. None: the whole response.

    Raises:
        ValueError: the prompt is not from `data.*.reasoning_gym`.
    """
    prefix, _, name = prompt.data_source.partition("/")
    if prefix != "reasoning_gym" or "metadata" not in prompt.extra_info:
        raise ValueError(f"data_source {prompt.data_source!r} with extra_info keys {sorted(prompt.extra_info)} does not come from reasoning-gym")
    answer = response.text.strip() if answer_tag is None else extract_answer(response.text, answer_tag)
    entry = {"question": prompt.messages[-1]["content"], "answer": prompt.ground_truth, "metadata": prompt.extra_info["metadata"]}
    return float(_task(name, prompt.extra_info["options"]).score_answer(answer, entry))


def _task(name: str, options: dict) -> ProceduralDataset:
    key = f"{name} {sorted(options.items())}"
    if key not in _tasks:
        _tasks[key] = library.create_dataset(name, **options)
    return _tasks[key]
