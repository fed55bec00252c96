"""The site: every exported name is in its API reference, and docstrings become Markdown. (`make docs` builds it.)"""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

import masked_dispatch
from masked_dispatch.tensor import colours
from repository import ROOT

REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")


@pytest.fixture
def as_markdown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The function of the site's extension, without the library that it extends."""
    griffe = types.ModuleType("griffe")
    griffe.Extension = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs/extensions/docstrings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.as_markdown  # type: ignore[no-any-return]


def test_every_exported_name_is_in_the_reference() -> None:
    named = set(re.findall(r"\bmasked_dispatch\.(\w+)", REFERENCE))
    assert named - {"__version__"} == set(masked_dispatch.__all__)


def test_a_paragraph_of_arguments_becomes_a_list_and_a_name_with_an_entry_a_link(
    as_markdown: Callable[[str], str],
) -> None:
    text = """What it does, as :func:`other` and :func:`masked_dispatch.from_nan` do; see `md.explain`, `explain(f)`.

data, mask  a tensor, and where
            it is valid
dim         an int

Raises ValueError."""
    assert (
        as_markdown(text)
        == """What it does, as `other` and [`masked_dispatch.from_nan`][masked_dispatch.from_nan] do; \
see [`md.explain`][masked_dispatch.explain], `explain(f)`.

- `data`, `mask`: a tensor, and where it is valid
- `dim`: an int

Raises ValueError."""
    )


def test_the_site_has_every_page() -> None:
    """So does the build, which fails for a page that is left out; this test fails earlier."""
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (navigation,) = re.findall(r"^nav:\n(.*)", configuration, re.MULTILINE | re.DOTALL)
    shown = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    (behind,) = re.findall(r"^not_in_nav: \|\n((?:  .*\n)+)", configuration, re.MULTILINE)
    (excluded,) = re.findall(r"^exclude_docs: \|\n((?:  .*\n)+)", configuration, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    in_the_repository = {page for page in pages if page.startswith(tuple(excluded.split()))}
    linked = {page.strip().removeprefix("/") for page in behind.splitlines()}
    assert shown | linked == pages - in_the_repository
    assert not shown & linked
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in shown]
    assert [page for page in linked if not any(f"]({page})" in text for text in texts)] == []


def test_every_family_of_the_semantics_has_an_example() -> None:
    """A section of the same title, but for a family that is refused, and for a scope."""
    semantics = (ROOT / "docs/semantics.md").read_text(encoding="utf-8")
    sections = semantics.partition("\n## Families\n")[2].partition("\n## ")[0].split("\n### ")[1:]
    titles = [section.partition("\n")[0] for section in sections]
    without = {"Products of block-scaled matrices", "Windows of padding"}
    page = (ROOT / "docs/semantics-examples.md").read_text(encoding="utf-8")
    examples = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    assert len(examples) > 20
    assert list(examples) == [title for title in titles if title not in without]
    assert [title for title, text in examples.items() if "```python\n>>> " not in text] == []


def test_the_pictures_are_as_drawn_and_described() -> None:
    """``python docs/extensions/pictures.py`` draws them again."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/extensions/pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = ROOT / "docs/pictures"
    assert {path.stem for path in folder.glob("*.svg")} == set(module.PICTURES)
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for name, draw in module.PICTURES.items():
        drawn = draw().svg()
        assert (folder / f"{name}.svg").read_text(encoding="utf-8") == drawn
        assert ElementTree.fromstring(drawn).find("{http://www.w3.org/2000/svg}title") is not None
        assert re.search(rf"!\[[^]]{{30,}}\]\(pictures/{name}\.svg\)", pages)


def test_invalid_has_one_colour_everywhere() -> None:
    """No module but that of the colours writes the grey of what is invalid."""
    files = [
        *(ROOT / "masked_dispatch").rglob("*.py"), *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "docs/extensions").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"),
    ]  # fmt: skip
    writing = [path.name for path in files if colours.INVALID in path.read_text(encoding="utf-8")]
    assert writing == ["colours.py"]
