"""Files that are on the disk when the call returns, so that they survive the machine as well as the process."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replaces `path` at once, after its bytes and what was renamed beside it before have reached the disk."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync(path.parent)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns when a file's bytes, or a directory's names, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
