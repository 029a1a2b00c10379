"""Answers that are right only if they are the ground truth, letter by letter."""

from __future__ import annotations

import re

from otb_megatron.types import Prompt, Response


def exact_match(prompt: Prompt, response: Response, *, pattern: str | None = None, ignore_case: bool = False) -> float:
    """1 if the answer equals `str(ground_truth)` up to surrounding white space, else 0.

    Args:
        pattern: regular expression whose last match in the response is the answer (its first group where it has one), for
            example `#### (.+)`; a response without a match scores 0. None: the whole response is the answer.
    """
    answer, truth = response.text, str(prompt.ground_truth)
    if pattern is not None:
        matches = list(re.finditer(pattern, answer))
        if not matches:
            return 0.0
        answer = matches[-1].group(1 if matches[-1].re.groups else 0)
    if ignore_case:
        answer, truth = answer.casefold(), truth.casefold()
    return float(answer.strip() == truth.strip())
