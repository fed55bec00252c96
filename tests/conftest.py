"""What every test runs under.

What is remembered as zero under a mask is verified where it is used. Hypothesis draws the same examples in every run,
so that a failure is found again; more of them where asked. Dynamo does not time its guards, and the garbage collector
leaves alone what was there before the first test.

``HYPOTHESIS_PROFILE=long python -m pytest tests/...`` draws many and anew each time. ``--part K/N`` runs every N-th
unit of tests, beginning with the K-th: so the slow ones, which are too many for one run, run in N. Tests that share
what a file makes once are one unit; ``--dist loadgroup`` runs it in one process.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Hashable, Iterator

import pytest
import torch
from hypothesis import settings

from op_registry.conformance.laws.modes import guards_not_timed
from op_registry.conformance.samples import part
from op_registry.records.fill import zeros_verified
from op_registry.registry import registry
from units_of_tests import unit_of

settings.register_profile("short", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=checked_part, default="0/1", metavar="K/N", help="every N-th unit of tests")


def checked_part(text: str) -> str:
    """The text, which pytest-xdist passes on to its processes."""
    part(text)
    return text


@pytest.hookimpl(trylast=True)  # after those that -m and -k leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    units: dict[Hashable, list[pytest.Item]] = {}
    for item in items:
        units.setdefault(unit_of(item), []).append(item)
    for unit, together in units.items():
        if unit != together[0].nodeid:
            for item in together:
                item.add_marker(pytest.mark.xdist_group(str(unit)))
    chosen = dict.fromkeys(item for unit in list(units.values())[part(config.getoption("part"))] for item in unit)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end, hundreds of thousands of objects that full collections need not visit."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def remembered_zeros_are_verified() -> Iterator[None]:
    with zeros_verified():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing has been compiled before, nothing stays; the same random numbers in every test."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def rules_forgotten() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    with registry.overlay():
        yield


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Every warning of a test, each time."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    with guards_not_timed():
        yield
