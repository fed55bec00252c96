"""The examples of README and docs that compile, export or ask the laws print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages import PAGES_THAT_TAKE_LONG, name_of, run_examples


@pytest.mark.parametrize("page", PAGES_THAT_TAKE_LONG, ids=name_of)
def test_examples_print_what_the_page_says(page: Path) -> None:
    run_examples(page)
