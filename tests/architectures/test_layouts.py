"""Every family in every layout that it can have: transformers' statistics, and weights that come out bit for bit as they went in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.parity import LAYOUTS, applies, check, make_models
from tests.models import CONFIGS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("models")
    make_models(work)
    return work


@pytest.mark.parametrize(("kind", "layout"), [(kind, layout) for kind in CONFIGS for layout in LAYOUTS if applies(kind, layout)])
def test_statistics_equal_transformers_and_weights_come_out_as_they_went_in(models: Path, tmp_path: Path, kind: str, layout: str) -> None:
    check(models, tmp_path / "export", kind, layout)
