"""Names and options of methods: what is refused, and what the message says."""

from __future__ import annotations

import pytest

from otb_megatron.algorithms import ADVANTAGES, CORRECTIONS, LOSSES, check_fields, check_loss_fields, check_options, choose, own_options
from otb_megatron.types import UserError


def test_every_fault_is_reported_at_once():
    options = {"tial": "hold", "tail": "zer", "discount": 1.5, "energy_floor": "1e-10"}
    with pytest.raises(UserError) as error:
        check_options("advantage", "optimal_token_baseline", [ADVANTAGES["optimal_token_baseline"].function], options)
    assert str(error.value).splitlines() == [
        "algorithm.advantage_options.tial='hold': optimal_token_baseline has no such option; did you mean 'tail'?",
        "algorithm.advantage_options.tail='zer': Input should be 'zero', 'mean' or 'hold'",
        "algorithm.advantage_options.discount=1.5: Input should be less than or equal to 1",
        "algorithm.advantage_options.energy_floor='1e-10': Input should be a valid number",
    ]


def test_a_method_without_options_says_so():
    with pytest.raises(UserError, match="algorithm.advantage_options.tail='zero': rloo has no such option; known here: none"):
        check_options("advantage", "rloo", [ADVANTAGES["rloo"].function], {"tail": "zero"})


def test_integers_are_numbers_and_null_is_allowed_where_it_is_a_default():
    check_options("loss", "clipped_surrogate", LOSSES["clipped_surrogate"].functions, {"clip_ratio_low": 1, "clip_ratio_dual": None})
    with pytest.raises(UserError, match="clip_ratio_dual=0.5: Input should be greater than 1"):
        check_options("loss", "clipped_surrogate", LOSSES["clipped_surrogate"].functions, {"clip_ratio_dual": 0.5})
    with pytest.raises(UserError, match="clip_ratio_low=nan: "):
        check_options("loss", "clipped_surrogate", LOSSES["clipped_surrogate"].functions, {"clip_ratio_low": float("nan")})


@pytest.mark.parametrize(
    ("kind", "name", "options", "told"),
    [
        ("rollout_correction", "masked", {"low": 6}, "rollout_correction_options.low=6 must be below algorithm.rollout_correction_options.high=5,"),
        ("rollout_correction", "masked_sequence", {"low": 0.9, "high": 0.8}, "low=0.9 must be below algorithm.rollout_correction_options.high=0.8,"),
        ("loss", "clip_cov", {"covariance_high": 1}, "covariance_low=1 must be below algorithm.loss_options.covariance_high=1,"),
    ],
)
def test_a_lower_bound_is_below_its_upper_one(kind, name, options, told):
    """With the defaults of what is not set. The distances of a clipped ratio are no such bounds."""
    functions = LOSSES[name].functions if kind == "loss" else [CORRECTIONS[name]]
    with pytest.raises(UserError, match=told):
        check_options(kind, name, functions, options)
    check_options("loss", "clip_cov", LOSSES["clip_cov"].functions, {"clip_ratio_low": 0.3, "clip_ratio_high": 0.1})


def test_unknown_names():
    assert choose("loss", "gspo", LOSSES) is LOSSES["gspo"]
    with pytest.raises(UserError, match="algorithm.loss='clipped_surogate': unknown; did you mean 'clipped_surrogate'?"):
        choose("loss", "clipped_surogate", LOSSES)
    with pytest.raises(UserError, match="algorithm.loss='zzz': unknown; known here: cispo, clip_cov, clipped_surrogate"):
        choose("loss", "zzz", LOSSES)


def test_loss_whose_inputs_the_run_does_not_have():
    check_loss_fields("gspo", {"offsets"})
    with pytest.raises(UserError, match="algorithm.loss='clip_cov' needs `selected`: "):
        check_loss_fields("clip_cov", {"offsets"})


def test_the_defaults_of_every_method_pass_their_own_checks():
    methods = [("advantage", name, [entry.function]) for name, entry in ADVANTAGES.items()]
    methods += [("loss", name, entry.functions) for name, entry in LOSSES.items()]
    methods += [("rollout_correction", name, [function]) for name, function in CORRECTIONS.items()]
    for kind, name, functions in methods:
        for function in functions:
            check_options(kind, name, functions, function.__kwdefaults__ or {})


def test_options_of_two_functions_under_one_name():
    """clip_cov takes those of its loss and those of its selection; each function is handed its own."""
    options = {"clip_ratio_low": 0.1, "selected_fraction": 0.5}
    check_options("loss", "clip_cov", LOSSES["clip_cov"].functions, options)
    assert [own_options(function, options) for function in LOSSES["clip_cov"].functions] == [{"clip_ratio_low": 0.1}, {"selected_fraction": 0.5}]
    with pytest.raises(UserError, match="selected_fraction=2: Input should be less than or equal to 1"):
        check_options("loss", "kl_cov", LOSSES["kl_cov"].functions, {"selected_fraction": 2})


@pytest.mark.parametrize("table, check", [(ADVANTAGES, check_fields), (LOSSES, check_loss_fields)])
def test_every_required_field_has_a_remedy(table, check):
    for name, entry in table.items():
        check(name, entry.required)
        for field in entry.required:
            with pytest.raises(UserError, match=f"{name!r} needs `{field}`: .{{20}}"):
                check(name, entry.required - {field})
