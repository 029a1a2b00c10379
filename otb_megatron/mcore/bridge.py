"""Megatron-Bridge, where a user has installed it: the description of a family that has no table in `weights/`."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PreTrainedConfig

from otb_megatron.types import UserError

_VERSION = "0.6.2"


def find_bridge(config: PreTrainedConfig) -> Any:
    """The `MegatronModelBridge` for the architecture that a config.json names, with the configuration at hand.

    Raises:
        UserError: Megatron-Bridge is not installed, cannot be imported, or does not know the architecture.
    """
    if importlib.util.find_spec("megatron.bridge") is None:
        raise UserError(
            f"Megatron-Bridge, which knows more families, is not installed: megatron-bridge {_VERSION} wants transformers 5.12.1 at most, older than "
            "vLLM's, so it goes in without its dependencies (docs/checkpoints.md)"
        )
    try:
        with _root_logger_kept():
            from megatron.bridge.models.conversion.model_bridge import get_model_bridge
    except ImportError as error:
        raise UserError(f"Megatron-Bridge is installed but cannot be imported: {error}; docs/checkpoints.md lists what it needs") from error
    if not config.architectures:
        raise UserError("config.json names no architectures, by which Megatron-Bridge knows a family")
    architecture = config.architectures[0]
    try:
        return get_model_bridge(getattr(transformers, architecture, architecture), config)
    except NotImplementedError as error:
        raise UserError(f"Megatron-Bridge does not know {architecture} either") from error


@contextlib.contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Megatron-LM's `megatron.training`, which Megatron-Bridge imports, gives the root logger a handler and has it print every INFO line."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
