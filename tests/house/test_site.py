"""The site: every exported name is in its API reference, and docstrings become Markdown. (`make docs` builds it.)"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import masked_dispatch
from masked_dispatch.tensor import printing
from op_registry.laws.inside import rules_inside_functions
from op_registry.report.explain import law_of_file, words_of
from pages import FENCED, LONGEST_LINE, ON_THE_SITE, name_of, text_of
from repository import ROOT

(PINNED,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")


def extension(name: str) -> types.SimpleNamespace:
    """A module of the site's own."""
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / f"docs/extensions/{name}.py")))


@pytest.fixture
def as_markdown(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The function of the site's extension, without the library that it extends."""
    griffe = types.ModuleType("griffe")
    griffe.Extension = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    return extension("docstrings").as_markdown  # type: ignore[no-any-return]


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

Example::

Raises ValueError."""
    assert (
        as_markdown(text)
        == """What it does, as `other` and [`masked_dispatch.from_nan`][masked_dispatch.from_nan] do; \
see [`md.explain`][masked_dispatch.explain], `explain(f)`.

- `data`, `mask`: a tensor, and where it is valid
- `dim`: an int

Example:

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


def test_the_semantics_can_be_read_from_top_to_bottom() -> None:
    """It defines principles and families; what one operator means is on the page that is written from the rules."""
    assert len((ROOT / "docs/semantics.md").read_bytes()) <= 40_000


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason="it lists the operators of the pinned torch")
def test_the_page_of_operators_is_as_written_from_the_rules() -> None:
    """``python docs/extensions/operators.py`` writes it again."""
    assert (ROOT / "docs/operators.md").read_text(encoding="utf-8") == extension("operators").page()


def test_the_page_of_operators_has_every_rule_and_everything_that_it_says() -> None:
    def words(text: str) -> str:
        return " ".join(re.sub(r"[\\`]|:\w+:", "", text).split())

    page = words((ROOT / "docs/operators.md").read_text(encoding="utf-8"))
    rules = [*filter(lambda rule: rule.is_built_in, masked_dispatch.registry.rules()), *rules_inside_functions()]
    assert sum(bool(words_of(rule)) for rule in rules) > 200
    for rule in rules:
        names = [op._schema.name.removeprefix("aten::").replace("::", ".") for op in rule.ops]
        missing = [said for said in (*names, *law_of_file(rule), *words_of(rule)) if words(said) not in page]
        assert missing == [], rule


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


def test_the_site_is_searched_from_disk() -> None:
    """The plugin would load the script from the network, if it found none with this name."""
    configuration = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "\n  - offline\n" in configuration
    (script,) = re.findall(r"polyfills: \[(\S*iframe-worker\S*)\]", configuration)
    assert "window.Worker=" in (ROOT / "docs" / script).read_text(encoding="utf-8")


def test_the_pictures_are_as_drawn_and_described() -> None:
    """``python docs/extensions/pictures.py`` draws them again."""
    module = extension("pictures")
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
    writing = [path.name for path in files if printing.INVALID in path.read_text(encoding="utf-8")]
    assert writing == ["printing.py"]


# -------------------------------------------------------------------------------------------------------------- widths

narrow = extension("narrow")


def tables_of(page: Path) -> list[list[list[str]]]:
    """Its tables: rows of cells as the site's extension is given them, the line below the names left out."""
    rows = re.compile(r"(?:^\|.*\|$\n?)+", re.MULTILINE)
    tables = [table.splitlines() for table in rows.findall(FENCED.sub("", text_of(page)))]
    return [[cells_of(line) for line in [names, *rest]] for names, _, *rest in tables]


def cells_of(line: str) -> list[str]:
    text = re.sub(r"\[([^]]*)\][(\[][^)\]]*[)\]]", r"\1", line.strip().strip("|")).replace("`", "")
    return [narrow.with_breaks(cell.replace("<br>", " ")) for cell in re.split(r"(?<!\\)\|", text)]


@pytest.mark.parametrize("page", ON_THE_SITE, ids=name_of)
def test_tables_fit_their_column(page: Path) -> None:
    """A table that does not has too many columns, or long names in several of them: make it a list."""
    for rows in tables_of(page):
        width = narrow.least_width(rows, narrow.SITE_CHARACTER, narrow.SITE_PADDING, prose=10)
        assert width <= narrow.SITE, f"{' | '.join(rows[0])} takes {width:.0f} pixels"


def test_the_width_of_a_table_is_that_of_its_longest_names() -> None:
    columns = [["a", "b"], ["a_name_of_seventeen", "some words, of which two or three are on a line"]]
    assert narrow.least_width(columns, 1, 0) == 19 + 18
    assert narrow.least_width([["torch.distributions.<wbr>LKJCholesky"]], 1, 0) == len("torch.distributions.")


def test_a_wide_table_says_which_column_a_cell_belongs_to_and_a_narrow_one_does_not() -> None:
    def table(cell: str) -> str:
        return f"<table>\n<tr>\n<th>a</th>\n<th>b</th>\n</tr>\n<tr>\n<td>{cell}</td>\n<td></td>\n</tr>\n</table>"

    assert narrow.on_page_content(table("1")) == table("1")
    wide = narrow.on_page_content(table("x" * 60))
    assert wide.startswith("<table data-rows>")
    assert re.findall(r"<(t\w) data-column=\"(.)\">", wide) == [("th", "a"), ("th", "b"), ("td", "a"), ("td", "b")]


def test_long_names_break_at_their_parts_and_options_nowhere() -> None:
    shown = narrow.on_page_content("<p><code>tests/interop/test_x.py --all</code></p><pre><code>a --b</code></pre>")
    option = '<span class="option">--all</span>'
    assert shown == f"<p><code>tests/interop/test_x.py {option}</code></p><pre><code>a --b</code></pre>"
    broken = "tests/<wbr>interop/<wbr>test_other_library.py"
    assert narrow.with_breaks(broken.replace("<wbr>", "")) == broken
    assert narrow.with_breaks(f"{'a' * 20}_{'b' * 20}") == f"{'a' * 20}<wbr>_{'b' * 20}"


def test_code_in_columns_is_marked() -> None:
    drawn = "<pre><code>&gt;&gt;&gt; t\ncall   rule\nexp    elementwise\nmean   reduction\nsort   choice\n</code></pre>"
    assert narrow.on_page_content(drawn) == drawn.replace("<pre", "<pre data-drawn")
    code = "<pre><code>&gt;&gt;&gt; f(\n...     x,\n...     y,\n...     z,\n... )\n1\n</code></pre>"
    assert narrow.on_page_content(code) == code


def test_code_in_docstrings_fits_its_box() -> None:
    texts = [inspect.getdoc(member) or "" for member in public_members()]
    blocks = [block for text in texts for block in re.findall(r"::\n\n((?:    .*\n)+)", text)]
    assert any("with masked_dispatch.trace() as t:" in block for block in blocks)
    assert [line for block in blocks for line in block.splitlines() if len(line) > LONGEST_LINE] == []


def public_members() -> Iterator[object]:
    """What the reference shows: exported names, and what is in exported modules and classes."""
    for name in masked_dispatch.__all__:
        member = getattr(masked_dispatch, name)
        yield member
        if inspect.ismodule(member) or inspect.isclass(member):
            yield from (value for inner, value in vars(member).items() if not inner.startswith("_"))
