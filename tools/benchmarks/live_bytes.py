"""What a piece of torch code allocates and communicates, seen at torch's dispatcher. Works on any device and needs no allocator hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the context, `peak_bytes` is the most that was alive at once of what was allocated inside it, after any operation.

    An operation's own workspace is not seen. `collectives` lists (operation, bytes of its largest tensor) in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.collectives: list[tuple[str, int]] = []
        self._outside: set[int] = set()  # storages that existed before
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook: nothing is compiled in here, and importing the compiler takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._forget_freed()
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._outside |= {x.untyped_storage()._cdata for x in inputs} - self._alive.keys()
        if func.namespace == "c10d":
            self.collectives.append((func.__name__.split(".")[0].strip("_"), max(x.nbytes for x in inputs)))
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self._outside:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._forget_freed()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return result

    def _forget_freed(self) -> None:
        self._alive = {key: (reference, size) for key, (reference, size) in self._alive.items() if not reference.expired()}
