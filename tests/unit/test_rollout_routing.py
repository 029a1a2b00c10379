"""Recorded routing put together from what an engine computed step by step."""

from __future__ import annotations

import numpy as np
import pytest

from otb_megatron.rollout.routing import _joined, _request_and_response


def test_a_sequence_is_told_by_its_name():
    """vLLM's names in generate() with one response a request, and with several."""
    assert _request_and_response("12-9f00ab3c") == (12, 0)
    assert _request_and_response("3_12-9f00ab3c") == (12, 3)
    with pytest.raises(RuntimeError, match="names a sequence 'cmpl-12'"):
        _request_and_response("cmpl-12")


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.uint8).reshape(-1, 1, 1)


def test_steps_follow_each_other_and_later_ones_win():
    """A prompt of three in two chunks and two more tokens; then the sequence was pushed out and computed again up to its fifth token."""
    parts = [(0, rows(1, 2)), (2, rows(3)), (3, rows(4)), (4, rows(5)), (0, rows(11, 12, 13, 14, 15)), (5, rows(16))]
    assert _joined("0-aaaaaaaa", parts).ravel().tolist() == [11, 12, 13, 14, 15, 16]


def test_a_token_without_a_record_is_an_error():
    with pytest.raises(RuntimeError, match="1 of 4 tokens of sequence 0-aaaaaaaa have no routed experts"):
        _joined("0-aaaaaaaa", [(0, rows(1, 2)), (3, rows(4))])
