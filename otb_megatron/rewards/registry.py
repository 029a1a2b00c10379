"""The reward functions by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from otb_megatron.types import UserError

RewardFunction = Callable[..., float]  # (prompt: Prompt, response: Response, **options) -> float

# Places, not functions: each verifier's library takes seconds to import, and only the worker processes need the one in use.
REWARDS: dict[str, str] = {
    "exact_match": "otb_megatron.rewards.exact_match:exact_match",
    "math_verify": "otb_megatron.rewards.math_verify:math_verify",
    "reasoning_gym": "otb_megatron.rewards.reasoning_gym:reasoning_gym",
}


def resolve(name: str, options: Mapping[str, Any] | None = None) -> RewardFunction:
    """Imports a reward function.

    Args:
        name: a key of `REWARDS`, or `package.module:function`.
        options: keyword arguments that it will be called with.

    Raises:
        UserError: no such function (nearest name suggested), its module cannot be imported, or it does not take (prompt, response, **options).
    """
    options = options or {}
    if ":" not in name and name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(REWARDS)}"
        raise UserError(f"rewards.function={name!r} is unknown; {hint} Your own is named package.module:function")
    module_name, _, attribute = REWARDS.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail in any way, and all of them are the user's to mend
        raise UserError(
            f"rewards.function={name!r}: module {module_name!r} cannot be imported: {type(error).__name__}: {error}. "
            "If it is yours, put its directory into PYTHONPATH"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise UserError(f"rewards.function={name!r}: {module_name} has no function {attribute!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise UserError(
            f"rewards.function={name!r} cannot be called as function(prompt, response, **options) with rewards.options={dict(options)}: {error}; "
            f"its signature is {inspect.signature(function)}"
        ) from error
    return function
