"""What is public: `dir(md)` is `md.__all__` is the API reference, for the package and each of its public modules."""

from __future__ import annotations

import re
import textwrap
from types import ModuleType

import pytest
from expecttest import assert_expected_inline as expect

import api_page
import masked_dispatch as md

MODULES = api_page.public_modules()


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_dir_shows_what_is_public(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_the_reference_is_written_anew_when_something_public_changes() -> None:
    """``PYTHONPATH=.:tests/helpers python tests/helpers/api_page.py`` writes it."""
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page()


def test_the_reference_has_every_name() -> None:
    listed = set(re.findall(r"^- `(md(?:\.\w+)+)", api_page.page(), re.MULTILINE))
    public = {f"{prefix}.{name}" for prefix, module in MODULES.items() for name in module.__all__}
    assert listed == public - set(MODULES)


def test_every_public_name_is_documented() -> None:
    lines = re.findall(r"^- `(.*?)`: (.*)$", api_page.page(), re.MULTILINE)
    assert len(lines) > 100
    assert [name for name, sentence in lines if len(sentence) < 10 or "deprecated" in sentence] == []


def test_the_names() -> None:
    expect(
        textwrap.fill(" ".join(dir(md)), 110),
        "",
    )
    expect(
        "\n".join(
            textwrap.fill(f"{prefix}: {' '.join(dir(module))}", 110, subsequent_indent="    ")
            for prefix, module in MODULES.items()
            if module is not md
        ),
        "",
    )
    expect(
        textwrap.fill(" ".join(api_page.own_methods()), 110),
        "",
    )
