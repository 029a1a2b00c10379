"""docs/configuration.md says what the code does."""

from __future__ import annotations

from tools.configuration_docs import PAGE, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
