"""What the tests of parallel layouts share."""

from __future__ import annotations

import pytest

from tests.distributed.layouts import MODELS, Reference


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Per model: the recorded samples, and what one process computes from them."""
    return {model: Reference.of(model, tmp_path_factory.mktemp(model)) for model in MODELS}
