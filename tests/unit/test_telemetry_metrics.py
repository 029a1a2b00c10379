"""Merged metrics do not depend on how the work was split, and equal hand-computed values."""

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otb_megatron.telemetry.metrics import Metrics


def record(tokens: list[int]) -> Metrics:
    metrics = Metrics()
    metrics.mean("mean", sum(tokens), len(tokens))
    metrics.sum("sum", sum(tokens))
    if tokens:
        metrics.maximum("max", max(tokens))
        metrics.minimum("min", min(tokens))
    return metrics


def test_a_mean_weighs_tokens_and_not_microbatches():
    """(1 + 2 + 3) over 3 tokens and 10 over 1 token: 16 / 4 = 4. The mean of the means would be (2 + 10) / 2 = 6."""
    metrics = record([1, 2, 3])
    metrics.merge(record([10]))
    assert metrics.values() == {"max": 10.0, "mean": 4.0, "min": 1.0, "sum": 16.0}
    assert list(metrics.values()) == ["max", "mean", "min", "sum"]


@given(st.lists(st.lists(st.integers(-1000, 1000)), min_size=1), st.randoms(use_true_random=False))
def test_any_split_in_any_order_gives_the_values_of_the_whole(parts, random):
    """Whole numbers add up exactly in floats, so equality is exact. Empty parts are ranks with filler microbatches only."""
    whole = record([token for part in parts for token in part])
    recorded = [record(part) for part in parts]
    random.shuffle(recorded)
    while len(recorded) > 1:
        other = recorded.pop(random.randrange(len(recorded)))
        recorded[random.randrange(len(recorded))].merge(other)
    assert recorded[0].values() == whole.values()


def test_each_mean_has_its_own_denominator_and_a_mean_over_nothing_is_left_out():
    metrics = Metrics()
    metrics.mean("per_token", 12.0, 6)
    metrics.mean("per_response", 12.0, 2)
    metrics.mean("never", 0.0, 0)
    assert metrics.values() == {"per_response": 6.0, "per_token": 2.0}


@pytest.mark.parametrize("values", [(1.0, math.nan, 2.0), (math.nan, 1.0, 2.0), (1.0, 2.0, math.nan)])
def test_nan_survives_every_kind_in_every_order(values):
    metrics = Metrics()
    for value in values:
        metrics.mean("mean", value, 1)
        metrics.sum("sum", value)
        metrics.maximum("max", value)
        metrics.minimum("min", value)
    assert all(math.isnan(value) for value in metrics.values().values())


def test_one_name_has_one_kind():
    metrics = Metrics()
    metrics.sum("x", 1)
    with pytest.raises(ValueError, match="'x' is a sum; it cannot also be a mean"):
        metrics.mean("x", 1, 1)


def test_a_merge_lists_every_clash_and_changes_nothing():
    left, right = Metrics(), Metrics()
    for name in ("a", "b", "c"):
        left.sum(name, 1)
    right.sum("a", 5)
    right.maximum("b", 5)
    right.minimum("c", 5)
    with pytest.raises(ValueError, match="'b' is a sum here and a maximum there; 'c' is a sum here and a minimum there"):
        left.merge(right)
    assert left.values() == {"a": 1.0, "b": 1.0, "c": 1.0}


def test_merging_leaves_the_other_untouched_and_unshared():
    left, right = Metrics(), Metrics()
    right.mean("x", 2, 1)
    left.merge(right)
    left.mean("x", 4, 1)
    assert (left.values(), right.values()) == ({"x": 3.0}, {"x": 2.0})


@pytest.mark.parametrize(("total", "count"), [(1.0, 0), (1.0, -1), (1.0, math.nan), (math.nan, 0)])
def test_a_mean_that_cannot_be_is_refused(total, count):
    with pytest.raises(ValueError, match="metric 'x'"):
        Metrics().mean("x", total, count)


def test_pickles_as_plain_floats():
    metrics = record([1, 2])
    assert pickle.loads(pickle.dumps(metrics)).values() == metrics.values()
    assert all(type(value) is float for value in metrics.values().values())
