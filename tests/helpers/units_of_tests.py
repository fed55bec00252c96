"""What tests cannot be divided into without making something twice."""

from __future__ import annotations

from collections.abc import Hashable

import pytest


def unit_of(item: pytest.Item) -> Hashable:
    """The same for tests of a file that share what its fixtures make once, such as a group of processes.

    The node's name for other tests, each of which is a unit by itself; for those that share, the file, and by which of
    a fixture's parameters.
    """
    info = getattr(item, "_fixtureinfo", None)
    made = [n for n, found in (info.name2fixturedefs.items() if info else ()) if found[-1].scope == "module"]
    if not made:
        return item.nodeid
    indices = item.callspec.indices if hasattr(item, "callspec") else {}
    return (item.path, *sorted((name, indices[name]) for name in made if name in indices))
