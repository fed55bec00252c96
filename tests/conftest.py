"""What every test runs under.

What is remembered as zero under a mask is verified where it is used. Hypothesis draws the same examples in every run,
so that a failure is found again; more of them where asked. Dynamo does not time its guards, and the garbage collector
leaves alone what was there before the first test.

``HYPOTHESIS_PROFILE=long python -m pytest tests/...`` draws many and anew each time. ``--part K/N`` runs every N-th
test, beginning with the K-th: so the slow ones, which are too many for one run, run in N.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from op_registry.conformance.guard_timing import guards_not_timed
from op_registry.records.zeros import zeros_verified

settings.register_profile("short", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


def part(text: str) -> tuple[int, int]:
    """K and N of "K/N", K from 0 to N - 1."""
    which, _, of = text.partition("/")
    if not (which.isdigit() and of.isdigit() and int(which) < int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 0 to N - 1")
    return int(which), int(of)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=part, metavar="K/N", help="every N-th test, beginning with the K-th")


@pytest.hookimpl(trylast=True)  # after those that -m and -k leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen: tuple[int, int] | None = config.getoption("part")
    if chosen is not None:
        which, of = chosen
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % of != which])
        items[:] = items[which::of]


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end, hundreds of thousands of objects that full collections need not visit."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def remembered_zeros_are_verified() -> Iterator[None]:
    with zeros_verified():
        yield


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    with guards_not_timed():
        yield
