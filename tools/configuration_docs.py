"""Writes docs/configuration.md from the settings' own defaults and descriptions: `python tools/configuration_docs.py`."""

from __future__ import annotations

import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from otb_megatron.config import Config, Section

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEADER = """# Configuration

One YAML file a run holds what differs from the defaults below; `section.key=value` on the command line replaces single settings.
The resolved configuration is saved as `config.yaml` in the run's directory. This page is written by `make docs` from
`otb_megatron/config.py`.
"""


def page() -> str:
    """The whole page."""
    return HEADER + "".join(_section(name, info.annotation) for name, info in Config.model_fields.items() if _is_section(info.annotation)) + _tables()


def _tables() -> str:
    return f"\n## megatron\n\n{Config.model_fields['megatron'].description}\n"


def _section(name: str, section: type[Section]) -> str:
    lines = [f"\n## {name}\n"]
    if section.__doc__ and section.__doc__ != Section.__doc__:
        lines.append(inspect.cleandoc(section.__doc__) + "\n")
    lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
    nested = []
    for key, info in section.model_fields.items():
        kind = info.annotation
        inner = next((part for part in getattr(kind, "__args__", (kind,)) if _is_section(part)), None)
        if inner is not None:
            nested.append((key, inner))
        lines.append(f"| `{key}` | {_type(kind)} | {_default(info)} | {' '.join((info.description or '').split())} |")
    text = "\n".join(lines) + "\n"
    sections = {inner: [key for key, other in nested if other is inner] for _, inner in nested}
    return text + "".join(_section(" and ".join(f"{name}.{key}" for key in keys), inner) for inner, keys in sections.items())


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _type(annotation: Any) -> str:
    if _is_section(annotation):
        return "section"
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (dict, tuple):
        return "mapping" if origin is dict else "list"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in parts)
    if origin is typing.Annotated:
        return _type(parts[0])
    return {str: "text", Path: "path", types.NoneType: "null"}.get(annotation) or annotation.__name__


def _default(info: Any) -> str:
    if info.default is PydanticUndefined:
        return "required" if info.default_factory is None else "empty"
    if isinstance(info.default, Section):
        return "section"
    return f"`{json.dumps(info.default, default=str)}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
