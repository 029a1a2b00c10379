"""Who may import what: a file's imports point to lower layers, and each library has one home.

Proven on every source file of the package, and of the checker on small sources that break each rule.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "otb_megatron"
ROOT = Path(__file__).resolve().parents[2] / PACKAGE

LAYERS = (
    ("config", "types", "jit"),
    ("algorithms", "ops", "weights", "rewards", "data", "telemetry"),
    ("mcore", "rollout"),
    ("trainer",),
    ("cli",),
)
LAYER = {part: number for number, row in enumerate(LAYERS) for part in row}
# config, types and jit are modules, not packages: nothing else of a row may be shared within it.
SIDEWAYS = {("config", "types")}

# Library -> the parts or modules of the package that may import it.
HOMES = {
    "megatron": ("mcore",),
    "transformer_engine": ("mcore",),
    "apex": ("mcore",),
    "vllm": ("rollout",),
    "ray": ("rollout",),
    "triton": ("ops",),
    "wandb": ("telemetry",),
    "mlflow": ("telemetry",),
    "tensorboard": ("telemetry",),
    "torch.utils.tensorboard": ("telemetry",),
    "torch.distributed": ("ops", "mcore", "trainer", "rollout.transfer", "rollout.sender", "rollout.receiver"),
    # torchrun's machinery starts processes and moves no tensors.
    "torch.distributed.elastic": ("cli",),
    "torch.distributed.launcher": ("cli",),
}


def imported_names(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a source imports, wherever in it, and each use of `torch.distributed` through `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("torch", "distributed"):
            yield node.lineno, "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value)


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `module` (`otb_megatron.mcore.step`) may not do and does, each with its line."""
    parts = module.split(".")[1:]
    found = [f"{module}: there is no `utils`; name the file after what it holds"] if "utils" in parts else []
    if not parts:
        own = None  # the package's __init__, below every layer
    elif parts[0] not in LAYER:
        return [*found, f"{module}: {parts[0]!r} has no layer; give it a place in LAYERS"]
    else:
        own = parts[0]
    for line, name in imported_names(ast.parse(source), module, is_package):
        fault = _package_fault(own, name.split(".")) if name.split(".")[0] == PACKAGE else _library_fault(".".join(parts), name)
        if fault:
            found.append(f"{module}:{line}: {fault}")
    return found


def _package_fault(own: str | None, name: list[str]) -> str | None:
    other = name[1] if len(name) > 1 else None
    if other not in LAYER or other == own or (own, other) in SIDEWAYS:  # the package's own attributes, such as __version__, are free
        return None
    if own is None:
        return f"the package itself imports {other}; importing any part would then import that one"
    if LAYER[other] > LAYER[own]:
        return f"{own} (layer {LAYER[own]}) imports {other} (layer {LAYER[other]}), which lies above it"
    return f"{own} imports {other}, its neighbour in layer {LAYER[own]}" if LAYER[other] == LAYER[own] else None


def _library_fault(place: str, name: str) -> str | None:
    """`place` is the module without the package's name, e.g. `rollout.sender`."""
    libraries = [library for library in HOMES if name == library or name.startswith(library + ".")]
    homes = [home for library in libraries for home in HOMES[library]]
    if not libraries or any(place == home or place.startswith(home + ".") for home in homes):
        return None
    return f"{max(libraries, key=len)} is imported in {', '.join(homes)} only"


def sources() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_the_package_keeps_its_layers() -> None:
    files = sources()
    assert {module.split(".")[1] for module, _ in files if "." in module} == set(LAYER), "LAYERS and the tree name different parts"
    found = [fault for module, path in files for fault in violations(module, path.read_text(), path.name == "__init__.py")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("mcore.step", "from otb_megatron.trainer.loop import train", "which lies above it"),
        ("types", "import otb_megatron.data.rows", "which lies above it"),
        ("types", "from otb_megatron.config import load", "its neighbour in layer 0"),
        ("mcore.step", "from otb_megatron import rollout", "its neighbour in layer 2"),
        ("rollout.pool", "from ..mcore import parallel", "its neighbour in layer 2"),
        ("ops.statistics", "from otb_megatron.algorithms.energy import energy", "its neighbour in layer 1"),
        ("ops.statistics", "def f():\n    from otb_megatron.weights import files", "its neighbour in layer 1"),
        ("trainer.loop", "import megatron.core.parallel_state", "megatron is imported in mcore only"),
        ("trainer.loop", "from megatron import core", "megatron is imported in mcore only"),
        ("mcore.step", "import ray", "ray is imported in rollout only"),
        ("mcore.step", "import importlib\nimportlib.import_module('vllm.config')", "vllm is imported in rollout only"),
        ("mcore.step", "import triton.language as tl", "triton is imported in ops only"),
        ("trainer.loop", "from torch.utils.tensorboard import SummaryWriter", "torch.utils.tensorboard is imported in telemetry only"),
        ("weights.files", "import torch.distributed as dist", "torch.distributed is imported in"),
        ("algorithms.reduce", "from torch import distributed", "torch.distributed is imported in"),
        ("algorithms.reduce", "import torch\ntorch.distributed.all_reduce(x)", "torch.distributed is imported in"),
        ("rollout.pool", "import torch.distributed", "torch.distributed is imported in"),
        ("cli", "import torch.distributed", "torch.distributed is imported in"),
        ("algorithms.utils", "", "there is no `utils`"),
        ("helpers", "", "has no layer"),
    ],
)
def test_a_breach_is_found(module: str, source: str, fault: str) -> None:
    (found,) = violations(f"{PACKAGE}.{module}", source)
    assert fault in found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("cli", "from otb_megatron import __version__\nfrom torch.distributed.launcher.api import elastic_launch"),
        ("config", "from otb_megatron.types import UserError"),
        ("trainer.loop", "import torch.distributed as dist\nfrom otb_megatron.mcore.step import train_step\nfrom otb_megatron.rollout.pool import RolloutPool"),
        ("rollout.sender", "import torch.distributed as dist\nimport ray\nfrom .transfer import BACKEND"),
        ("mcore.step", "import megatronics, raytracer\nimport megatron.core"),
        ("telemetry.sinks", "import wandb\nfrom torch.utils.tensorboard import SummaryWriter"),
    ],
)
def test_what_is_allowed_is_not_found(module: str, source: str) -> None:
    assert violations(f"{PACKAGE}.{module}", source) == []
