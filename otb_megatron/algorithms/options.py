"""Choosing a method by name and checking the options that the configuration gives it."""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from otb_megatron.types import UserError

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AboveOne = Annotated[float, Field(gt=1)]

# Options that bound one quantity from below and from above. `clip_ratio_low` and `clip_ratio_high` do not: they are distances to either side of 1.
_BOUNDS = (("low", "high"), ("covariance_low", "covariance_high"))


def choose[Entry](kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """`table[name]`; `kind` is the setting's name below `algorithm`: "advantage", "loss" or "rollout_correction".

    Raises:
        UserError: the name is not in the table; the message gives the nearest one, or all.
    """
    if name not in table:
        raise UserError(f"algorithm.{kind}={name!r}: unknown; {_hint(name, table)}")
    return table[name]


def check_required(kind: str, name: str, required: Collection[str], available: Collection[str], provided_by: Mapping[str, str]) -> None:
    """Raises a UserError with a line for each field that the method requires and the run does not have; `provided_by` says how to get it."""
    missing = sorted(set(required) - set(available))
    if missing:
        raise UserError("\n".join(f"algorithm.{kind}={name!r} needs `{field}`: {provided_by[field]}" for field in missing))


def own_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that are keyword-only parameters of `function`."""
    names = _option_names(function)
    return {name: value for name, value in options.items() if name in names}


def check_options(kind: str, name: str, functions: Sequence[Callable[..., Any]], options: Mapping[str, Any]) -> None:
    """Checks options against the keyword-only parameters of `functions`: names, types and bounds as annotated there.

    Args:
        kind: "advantage", "loss" or "rollout_correction".
        name: the name that the method was chosen by.
        functions: the method, and others that take options under its name.
        options: of the configuration, `algorithm.<kind>_options`.

    Raises:
        UserError: every option that is unknown (with the nearest known name) or has a value it cannot take, all at once; a lower bound
            that is not below its upper one.
    """
    hints = {option: hint for function in functions for option, hint in typing.get_type_hints(function, include_extras=True).items()}
    known = [option for function in functions for option in _option_names(function)]
    faults = []
    for option, value in options.items():
        place = f"algorithm.{kind}_options.{option}={value!r}"
        if option not in known:
            faults.append(f"{place}: {name} has no such option; {_hint(option, known)}")
            continue
        try:
            TypeAdapter(hints[option], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError as error:
            faults.append(f"{place}: {error.errors()[0]['msg']}")
    if not faults:
        faults = _crossed_bounds(kind, {name: value for function in functions for name, value in (function.__kwdefaults__ or {}).items()} | dict(options))
    if faults:
        raise UserError("\n".join(faults))


def _crossed_bounds(kind: str, options: Mapping[str, Any]) -> list[str]:
    place = f"algorithm.{kind}_options"
    return [
        f"{place}.{low}={options[low]:g} must be below {place}.{high}={options[high]:g}, or nothing lies between them"
        for low, high in _BOUNDS
        if low in options and high in options and options[low] >= options[high]
    ]


def _option_names(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _hint(name: str, known: typing.Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known) or 'none'}"
