"""Which parts of the long tests a commit gets (.ci/parts.py)."""

from __future__ import annotations

import re
import runpy
from collections import Counter

import pytest

from op_registry.conformance.samples import part
from repository import ROOT
from units_of_tests import unit_of

RUN = (ROOT / ".ci/run").read_text(encoding="utf-8")
DRAWN = [(name, int(pieces)) for name, pieces in re.findall(r"\$\(part (\w+) (\d+)\)", RUN)]
drawn = runpy.run_path(str(ROOT / ".ci/parts.py"))["drawn"]


def test_all_parts_get_drawn() -> None:
    assert DRAWN == [("thorough", 3), ("slow", 48), ("conformance", 48), ("compiled", 48)]
    commits = [f"{number:040x}" for number in range(1000)]
    for name, pieces in DRAWN:
        turns = Counter(drawn(name, pieces, commit) for commit in commits)
        assert set(turns) == {f"{number}/{pieces}" for number in range(pieces)}
        assert max(turns.values()) < 3 * 1000 / pieces


def test_a_commit_gets_the_same_parts_again_and_other_ones_for_other_names() -> None:
    assert drawn("slow", 48, "a" * 40) == drawn("slow", 48, "a" * 40)
    assert len({drawn(name, 48, "a" * 40) for name in ("slow", "conformance", "compiled")}) > 1


def test_every_test_is_in_one_part() -> None:
    items = list(range(100))
    assert sorted(item for k in range(3) for item in items[part(f"{k}/3")]) == items


@pytest.fixture(scope="module", params=["two", "four"])
def made_once(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_tests_that_share_what_a_file_makes_once_are_one_unit(request: pytest.FixtureRequest, made_once: str) -> None:
    unit = (request.path, ("made_once", ["two", "four"].index(made_once)))
    assert unit_of(request.node) == unit
    assert request.node.get_closest_marker("xdist_group").args == (str(unit),)


def test_another_test_is_a_unit_by_itself(request: pytest.FixtureRequest) -> None:
    assert unit_of(request.node) == request.node.nodeid
    assert request.node.get_closest_marker("xdist_group") is None
