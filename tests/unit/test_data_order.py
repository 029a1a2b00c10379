"""The order of prompts: each once an epoch, the same after every resume, refused over other data."""

from __future__ import annotations

import pytest

from otb_megatron.data.order import PromptOrder
from otb_megatron.types import UserError


def test_the_order_is_pinned() -> None:
    """A resumed run may use another numpy: these draws must never change. Values: argsort of PCG64([7, epoch]).random_raw(6)."""
    order = PromptOrder(6, shuffle=True, seed=7)
    assert (order.next(6), order.next(6)) == ([3, 4, 0, 2, 5, 1], [1, 3, 2, 4, 5, 0])


def test_without_shuffling_it_counts() -> None:
    order = PromptOrder(3, shuffle=False, seed=7)
    assert [order.next(2) for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    assert order.epoch == 2


@pytest.mark.parametrize("count", [1, 3, 7, 10, 11, 25])
def test_each_prompt_exactly_once_an_epoch(count: int) -> None:
    order, seen = PromptOrder(10, shuffle=True, seed=0), []
    while len(seen) < 10 * count:
        seen += order.next(count)
    epochs = [seen[start : start + 10] for start in range(0, 10 * count, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert count == 1 or len({tuple(epoch) for epoch in epochs}) > 1


def test_seeds_differ_and_a_negative_one_works() -> None:
    orders = {tuple(PromptOrder(20, shuffle=True, seed=seed).next(20)) for seed in (-1, 0, 1)}
    assert len(orders) == 3


def test_resume_at_every_step_continues_exactly() -> None:
    """Ten prompts, batches of 4: every position, the ends of epochs among them (batch 5 ends one exactly)."""
    uninterrupted = PromptOrder(10, shuffle=True, seed=3)
    batches = [uninterrupted.next(4) for _ in range(12)]
    for killed_after in range(12):
        first = PromptOrder(10, shuffle=True, seed=3)
        head = [first.next(4) for _ in range(killed_after)]
        resumed = PromptOrder(10, shuffle=True, seed=3)
        resumed.load_state_dict(first.state_dict())
        assert head + [resumed.next(4) for _ in range(12 - killed_after)] == batches


def test_a_state_of_other_data_is_refused_with_every_difference() -> None:
    state = PromptOrder(10, shuffle=True, seed=3).state_dict()
    with pytest.raises(UserError, match="num_prompts was 10 and is now 11; shuffle was True and is now False; seed was 3 and is now 4"):
        PromptOrder(11, shuffle=False, seed=4).load_state_dict(state)
