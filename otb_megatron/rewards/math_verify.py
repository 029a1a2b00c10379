"""Mathematical equality by the math-verify library."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from otb_megatron.types import Prompt, Response

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own deadlines are off, which is on purpose


def math_verify(prompt: Prompt, response: Response) -> float:
    """1 if the answer that math-verify finds in the response equals the ground truth, else 0.

    It finds `\\boxed` before `final answer is` before other expressions, of these the last one. Several boxes are one answer, the
    set of their contents, so a response that boxes two guesses is wrong. A ground truth without `$` or `\\boxed` is read as the
    inside of a box. math-verify's own deadlines are off: they need signals and cannot interrupt C code; the pool's can.

    Raises:
        ValueError: the ground truth is no mathematical expression.
    """
    truth = _parsed_truth(str(prompt.ground_truth))
    if not truth:
        raise ValueError(f"the ground truth {prompt.ground_truth!r} is no mathematical expression")
    answer = parse(response.text, parsing_timeout=None)
    return float(verify(truth, answer, timeout_seconds=None))


@lru_cache(maxsize=1024)  # all responses to a prompt share it
def _parsed_truth(text: str) -> Any:
    return parse(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}", parsing_timeout=None)
