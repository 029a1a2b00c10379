"""Settings of every test process, and the rule that a test which was collected is a test which ran."""

from __future__ import annotations

import os

# Before torch is imported. Tests start several processes on few cores: with more threads than that they would wait for each other.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs a download is broken everywhere but at its author's

from collections.abc import Generator  # noqa: E402
from typing import Any  # noqa: E402

import hypothesis  # noqa: E402
import pytest  # noqa: E402

# No test depends on how fast it runs: on a busy machine an example takes many times as long.
hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    """A skipped test fails, unless it is marked `gpu`: what is skipped unseen goes wrong unseen."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped; only tests marked `gpu` may be: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, pytest.CollectReport]:
    """The same for a whole file, which `importorskip` would leave out."""
    report = yield
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{collector.nodeid} was skipped as a whole: {report.longrepr}"
    return report
