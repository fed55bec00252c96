"""README and docs are true: their examples print what they say, and what they name by path or by name is there."""

from __future__ import annotations

import functools
import importlib
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import masked_dispatch
import op_registry
from benchmarks.__main__ import NAMES as BENCHMARKS
from op_registry.__main__ import main
from op_registry.report import coverage
from pages import (
    COMMANDS_OF_OP_REGISTRY,
    FENCED,
    LONG_COMMANDS,
    LONGEST_LINE,
    ON_THE_SITE,
    PAGES,
    PAGES_THAT_TAKE_LONG,
    PAGES_WITH_EXAMPLES,
    README,
    WrappedOutput,
    commands_of,
    name_of,
    run_command,
    run_examples,
    text_of,
)
from repository import ROOT

OUR_FOLDERS = "op_registry|masked_dispatch|tests|docs|benchmarks|examples"
PATH = re.compile(rf"(?<![\w/.-])(?:{OUR_FOLDERS})/[\w./-]*[\w/]")
DOTTED_NAME = re.compile(r"`((?:op_registry|masked_dispatch|md)(?:\.\w+)+)")
FILE_NAME = re.compile(r"`([\w/]+\.(?:py|tsv|txt|toml))`")
# Blocks of code, those in lists too.
CODE = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")

COMMANDS_OF = (
    "make ",
    "pip install ",
    "python -m masked_dispatch ",
    "python -m op_registry ",
    "python -m benchmarks ",
    "python -m benchmarks.page ",
    "python -m benchmarks.device ",
    "TORCH_SOURCE=",
    "pytest",
)


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return FENCED.sub("", text_of(page))


PAGE_OF_COMMANDS = ROOT / "docs/commands.md"
COMMANDS = commands_of(PAGE_OF_COMMANDS)
every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ----------------------------------------------------------------------------------------------------------- examples


@every_page
def test_every_block_is_of_a_kind_that_is_tested(page: Path) -> None:
    for language, text in FENCED.findall(text_of(page)):
        assert language in ("python", "", "text"), f"a block of an unknown kind: {language}"
        if language == "python":
            assert text.startswith(">>> "), f"not an example that is run:\n{text}"
    for command in commands_of(page):
        assert command.startswith(COMMANDS_OF), f"not a command that is known: {command}"


@pytest.mark.parametrize("page", [README, *ON_THE_SITE], ids=name_of)
def test_code_fits_its_box(page: Path) -> None:
    """A longer line is wrapped: outputs at a space, which the tests of examples allow them."""
    long = [line for text in CODE.findall(text_of(page)) for line in text.splitlines() if len(line) > LONGEST_LINE]
    assert long == []


def test_an_output_is_wrapped_where_it_is_long_and_nowhere_else() -> None:
    wrapped = WrappedOutput().check_output
    long = f"({'1234, ' * 20}5)\n"
    assert wrapped(long.replace("1234, " * 10, "1234, " * 10 + "\n    ", 1), long, 0)
    assert not wrapped(long.replace("1234", "123", 1), long, 0)
    assert not wrapped("1,\n2\n", "1, 2\n", 0)


def test_the_pages_with_examples_are_found() -> None:
    assert {name_of(page) for page in PAGES_WITH_EXAMPLES} >= {"README.md", "docs/write-a-rule.md"}


@pytest.mark.parametrize("page", [p for p in PAGES_WITH_EXAMPLES if p not in PAGES_THAT_TAKE_LONG], ids=name_of)
def test_examples_print_what_the_page_says(page: Path) -> None:
    """Those of the other pages: thorough/house/test_examples_that_take_long.py."""
    run_examples(page)


# ------------------------------------------------------------------------------------------------ paths, names, links


@functools.cache
def files() -> tuple[str, ...]:
    """Every file of ours, as a path from the root with a slash in front."""
    folders = [ROOT / folder for folder in OUR_FOLDERS.split("|")]
    return tuple(
        f"/{path.relative_to(ROOT)}" for path in [*ROOT.iterdir(), *(p for f in folders for p in f.rglob("*"))]
    )


def resolves(dotted: str) -> bool:
    """Whether a dotted name leads to a module or to an attribute of one."""
    first, *rest = dotted.split(".")
    package = {"md": "masked_dispatch"}.get(first, first)
    value = importlib.import_module(package)
    for n, part in enumerate(rest):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join([package, *rest[: n + 1]]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


@every_page
def test_paths_that_a_page_names_exist(page: Path) -> None:
    base = page.parent if page.parent.name == "third_party" else ROOT
    paths = PATH.findall(text_of(page))
    assert [path for path in paths if not (base / path).exists() and not (ROOT / path).exists()] == []
    names = FILE_NAME.findall(prose_of(page))
    assert [name for name in names if not any(file.endswith(f"/{name}") for file in files())] == []


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in LINK.findall(prose_of(page)) if not (page.parent / link).exists()] == []


def sections_of(page: Path) -> set[str]:
    """The names that the site gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    ascii_only = [heading.encode("ascii", "ignore").decode() for heading in plain]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in ascii_only}


@every_page
def test_links_to_a_section_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", prose_of(page))
    there = {target: sections_of(page.parent / target if target else page) for target, _ in links}
    assert [(target, section) for target, section in links if section not in there[target]] == []


@every_page
def test_names_that_a_page_names_can_be_imported(page: Path) -> None:
    assert [name for name in DOTTED_NAME.findall(prose_of(page)) if not resolves(name)] == []


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert resolves("op_registry.sparse.record.Sparse")
    assert resolves("md.missing.ffill")
    assert not resolves("op_registry.sparse.turned")
    assert not resolves("masked_dispatch.tensor.masked_tensor.Nothing")


@pytest.mark.parametrize("package", [op_registry, masked_dispatch], ids=lambda package: package.__name__)
def test_the_diagram_has_every_room(package: ModuleType) -> None:
    """Rooms: the modules and folders at a package's top, as tests of imports know them."""
    (diagram,) = [
        text for language, text in FENCED.findall(text_of(ROOT / "docs/architecture.md")) if language == "text"
    ]
    folder = ROOT / package.__name__
    lines = diagram[diagram.index(f"{folder.name}/") :].partition("\n\n")[0].splitlines()[1:]
    drawn = {room.rstrip("/") for line in lines for room in line[:33].split()}
    rooms = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert drawn == rooms - {"__init__"}


# ------------------------------------------------------------------------------------------- commands, what is needed


@pytest.mark.parametrize("command", [c for c in COMMANDS_OF_OP_REGISTRY if c not in LONG_COMMANDS])
def test_the_commands_of_op_registry_work(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The long ones: test_examples_that_take_long.py."""
    assert run_command(command) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_there_is_a_command_of_each_kind() -> None:
    assert {c.split()[3] for c in COMMANDS if "op_registry" in c} >= {"explain", "coverage", "check", "mutants"}


def test_the_options_that_the_page_of_commands_names_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["coverage", "--help"])
    assert left.value.code == 0
    assert "--measure" in capsys.readouterr().out
    assert "--measure" in text_of(PAGE_OF_COMMANDS)
    assert f"{len(list(coverage.entries()))} OpInfos" in text_of(PAGE_OF_COMMANDS)


def test_the_targets_of_make_are_there() -> None:
    targets = re.findall(r"^([\w-]+):", text_of(ROOT / "Makefile"), re.MULTILINE)
    named = {word for page in PAGES for c in commands_of(page) if c.startswith("make ") for word in c.split()[1:2]}
    assert named
    assert named <= set(targets)


def test_the_benchmarks_are_there() -> None:
    text = text_of(PAGE_OF_COMMANDS)
    run = {shlex.split(command)[3] for command in COMMANDS if command.startswith("python -m benchmarks ")}
    named = re.findall(r"`(\w+)`", text.partition("The benchmarks are ")[2].partition(". ")[0])
    assert sorted(named) == sorted(BENCHMARKS)
    assert run
    assert run <= set(BENCHMARKS)


def test_the_readme_is_a_page_that_begins_with_how_to_install() -> None:
    text = text_of(README)
    assert len(text.splitlines()) <= 115
    language, first = FENCED.findall(text)[0]
    assert (language, first.split()[:2]) == ("", ["pip", "install"])
    assert commands_of(README)[1:] == ["make demo", "make test"]


def test_the_readme_names_the_versions_that_are_supported() -> None:
    project, readme = text_of(ROOT / "pyproject.toml"), text_of(README)
    for pattern in (r'requires-python = ">=(.*)"', r'dependencies = \["torch>=(.*)"\]', r'version = "(.*)"'):
        (version,) = re.findall(f"^{pattern}$", project, re.MULTILINE)
        assert re.search(rf"(Python ≥ |torch ≥ |\*\*Status:\*\* ){re.escape(version)}\b", readme), version
