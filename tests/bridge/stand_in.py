"""Importing Megatron-Bridge on a machine without Transformer Engine, which has no CPU build and which Bridge's import insists on.

Only its LoRA layers use what the stand-in stands for; nothing of them takes part in describing weights.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

_PACKAGE = "transformer_engine"


class _AnyName(type):
    """A class of which every attribute is such a class again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (), {})


class _Module(types.ModuleType):
    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        return getattr(_AnyName, name) if name.startswith("__") else _AnyName(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == _PACKAGE else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_megatron_bridge() -> None:
    """Imports Megatron-Bridge. Megatron-Core's modules that we use are imported before, so that they see no Transformer Engine."""
    import otb_megatron.mcore.model
    import otb_megatron.mcore.optimizer
    import otb_megatron.mcore.step  # noqa: F401

    if importlib.util.find_spec(_PACKAGE) is not None:
        import megatron.bridge  # noqa: F401

        return
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        import megatron.bridge  # noqa: F401, F811
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == _PACKAGE]:
            del sys.modules[name]
